"""Converts a program's values to the inputs of a call, and an answer to outputs. Pure functions.

Arrays are sent in the datatype of the model's signature. Lists of numbers, and arrays of another float or integer type,
are converted if only precision is lost: never 0.5 to an integer, 300 to UINT8, nor 1e300 to an infinite FP32. Only str
and bytes become BYTES. A frame's columns are brought into the model's order by their names, where the model has names;
dates become seconds. The endpoint checks the shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np

from shoal.client.retry import Reply
from shoal.errors import ConfigError, ConnectionLost, InferenceError
from shoal.frame import find_names, list_rows, require_columns, select_columns
from shoal.frame import to_floats as to_float_columns
from shoal.open_inference.binary_tensors import from_binary, to_binary
from shoal.open_inference.datatypes import NUMPY_DTYPES, bf16_values, to_floats
from shoal.open_inference.json_tensors import to_json
from shoal.open_inference.messages import (
    NO_DATA,
    InferRequest,
    InferResponse,
    InputTensor,
    ModelMetadata,
    OutputTensor,
    Parameters,
    RequestedOutput,
    TensorDescription,
)
from shoal.open_inference.rows import list_fields

ArrayLike: TypeAlias = np.ndarray | Sequence[Any]
Inputs: TypeAlias = Mapping[str, ArrayLike] | ArrayLike

HEADER_LENGTH = "inference-header-content-length"


@dataclass(frozen=True, slots=True)
class Answer(Mapping[str, np.ndarray]):
    """The outputs of one call, a mapping by name, and the version of the weights that computed them.

    BF16 outputs are float32 here; BYTES outputs are object arrays of bytes.
    """

    outputs: dict[str, np.ndarray]
    version: int
    model: str
    request_id: str = ""

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.outputs:
            raise KeyError(f"there is no output {name!r}: {self.model} gave {', '.join(map(repr, self.outputs))}")
        return self.outputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)


def as_arrays(model: str, signature: Sequence[TensorDescription], inputs: Inputs) -> dict[str, np.ndarray]:
    """Convert every input to the signature's datatypes, by name. Raises ConfigError naming the input."""
    names = [spec.name for spec in signature]
    if not isinstance(inputs, Mapping):
        if len(names) != 1:
            raise ConfigError("inputs", "one array", f"{model} has {len(names)} inputs", f"name them: {names}")
        inputs = {names[0]: inputs}
    unknown = sorted(set(inputs) - set(names))
    if unknown:
        raise ConfigError("inputs", unknown[0], f"{model} has no such input", f"its inputs are {names}")
    specs = {spec.name: spec for spec in signature}
    return {name: _convert(name, _align(values, specs[name]), specs[name].datatype) for name, values in inputs.items()}


def encode_inputs(
    signature: ModelMetadata,
    inputs: Inputs,
    outputs: Collection[str] | None,
    request_id: str,
    parameters: Parameters | None = None,
    *,
    binary: bool,
) -> tuple[dict[str, str], bytes]:
    """Encode the headers and body of an inference request. Raises ConfigError."""
    if isinstance(outputs, str):
        raise ConfigError("outputs", outputs, "is a single name", "give a list of names, or None for all")
    if outputs is not None and not len(outputs):
        raise ConfigError("outputs", outputs, "asks for nothing", "give names, or None for all")
    arrays = as_arrays(signature.name, signature.inputs, inputs)
    datatypes = {spec.name: spec.datatype for spec in signature.inputs}
    requested = None if outputs is None else [RequestedOutput(name) for name in outputs]
    if not binary:
        values = {name: to_json(name, datatypes[name], array, role="input") for name, array in arrays.items()}
        tensors = [
            InputTensor(name, list(array.shape), datatypes[name], data=msgspec.Raw(msgspec.json.encode(values[name])))
            for name, array in arrays.items()
        ]
        request = InferRequest(tensors, request_id or None, parameters, requested)
        return {"content-type": "application/json"}, msgspec.json.encode(request)
    buffers = {name: to_binary(datatypes[name], array) for name, array in arrays.items()}
    tensors = [
        InputTensor(name, list(array.shape), datatypes[name], {"binary_data_size": len(buffers[name])}, NO_DATA)
        for name, array in arrays.items()
    ]
    parameters = {**(parameters or {}), "binary_data_output": True}
    head = msgspec.json.encode(InferRequest(tensors, request_id or None, parameters, requested))
    headers = {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(head))}
    return headers, b"".join([head, *buffers.values()])


def encode_rows(rows: Any, rows_per_request: int, inputs: Sequence[TensorDescription] = ()) -> list[bytes]:
    """Encode the bodies of requests for rows: of one mapping, or of a list of them, or a frame with the columns of
    `inputs`, further ones of which are left out. Raises ConfigError."""
    if isinstance(rows, Mapping):
        return [_encode_row(rows)]
    listed = list_rows(rows, list_fields(inputs))
    starts = range(0, max(len(listed), 1), rows_per_request)
    return [_encode_row(listed[start : start + rows_per_request]) for start in starts]


def _to_json_value(value: Any) -> Any:
    if hasattr(value, "isoformat"):  # of pandas; NaT does not equal itself
        return value.isoformat() if value == value else None
    if hasattr(value, "tolist"):
        return value.tolist()
    remedy = "give numbers, texts, dates, true, false or None"
    raise ConfigError("rows", value, f"has a value of type {type(value).__name__}", remedy)


_encode_row = msgspec.json.Encoder(decimal_format="number", enc_hook=_to_json_value).encode


def decode_answer(reply: Reply) -> Answer:
    """Decode an answer. Raises ConnectionLost when it is not the protocol's."""
    try:
        length = int(reply.headers.get(HEADER_LENGTH, len(reply.body)))
        head = msgspec.json.decode(memoryview(reply.body)[:length], type=InferResponse)
        rest = memoryview(reply.body)[length:]
        outputs = {}
        for tensor in head.outputs:
            size = int((tensor.parameters or {}).get("binary_data_size", -1))
            if size < 0:
                outputs[tensor.name] = _from_json(tensor)
                continue
            array = from_binary(tensor.name, tensor.datatype, tensor.shape, rest[:size], role="output")
            outputs[tensor.name] = bf16_values(array) if tensor.datatype == "BF16" else array
            rest = rest[size:]
        return Answer(outputs, int(head.model_version), head.model_name, head.id or "")
    except (msgspec.DecodeError, KeyError, ValueError, InferenceError) as error:
        raise ConnectionLost(f"the server is no endpoint of this kind: {error}") from None


def _align(values: ArrayLike, spec: TensorDescription) -> ArrayLike:
    """The columns of a frame in the order of the model's names. Raises DataError naming those that do not fit."""
    names = find_names(values)
    if names is None:
        return values
    columns = spec.columns or names
    require_columns(spec.name, names, columns)
    if spec.datatype in ("FP64", "FP32", "FP16", "BF16"):
        return to_float_columns(spec.name, values, columns)
    return select_columns(values, columns)


def _convert(name: str, values: ArrayLike, datatype: str) -> np.ndarray:
    if datatype == "BYTES":
        return _to_bytes_array(name, values)
    dtype = np.dtype(np.float32) if datatype == "BF16" else NUMPY_DTYPES[datatype]
    try:
        array = np.asarray(values)
    except ValueError:  # NumPy raises it for lists only
        remedy = "send rows of equal length together"
        raise ConfigError("inputs", name, "is no array: its rows have different lengths", remedy) from None
    except (TypeError, RuntimeError) as error:  # torch raises them for tensors on a GPU, of BF16, or with a gradient
        raise ConfigError("inputs", name, f"is no array: {error}", "give a NumPy array") from None
    if datatype == "BF16" and array.dtype == np.uint16:
        return array
    if datatype == "UINT64" and array.dtype.kind in "fO":
        array = _to_exact_uint64(name, values, array)
    is_whole = dtype.kind in "iu" and array.dtype.kind in "iu"
    if not is_whole and not np.can_cast(array.dtype, dtype, "same_kind"):
        remedy = f"give an array of {dtype}"
        raise ConfigError("inputs", name, f"is {array.dtype}, the model takes {datatype}", remedy)
    try:
        converted = to_floats(array, datatype) if dtype.kind == "f" else array.astype(dtype, copy=False)
        fits = not is_whole or array.dtype == dtype or np.array_equal(converted, array)
    except OverflowError:
        fits = False
    if not fits:
        raise ConfigError("inputs", name, f"has values that {datatype} cannot hold", "check its range")
    return converted


def _to_exact_uint64(name: str, values: ArrayLike, array: np.ndarray) -> np.ndarray:
    """Convert integers on both sides of 2**63, which NumPy turns into floats, exactly; returns `array` for other
    values."""
    exact = np.asarray(values, dtype=object)
    if not all(isinstance(each, int | np.integer) for each in exact.flat):
        return array
    try:
        return exact.astype(np.uint64)
    except OverflowError:
        raise ConfigError("inputs", name, "has values that UINT64 cannot hold", "check its range") from None


def _to_bytes_array(name: str, values: ArrayLike) -> np.ndarray:
    """Convert to an object array of bytes. Raises ConfigError naming the element that is neither str nor bytes."""
    try:
        elements = np.asarray(values, dtype=object)
    except ValueError as error:
        raise ConfigError("inputs", name, f"is no array: {error}", "give rows of equal length") from None
    encoded = np.empty(elements.shape, dtype=object)
    for index, each in np.ndenumerate(elements):
        try:
            encoded[index] = bytes(each) if isinstance(each, bytes) else str.encode(each)
        except (TypeError, UnicodeEncodeError):  # for values that are not str, and for str without UTF-8
            which = f"element {index[0] if len(index) == 1 else list(index)} " if index else ""
            raise ConfigError("inputs", name, f"{which}is {each!r}, no text", "give str or bytes") from None
    return encoded


def _from_json(tensor: OutputTensor) -> np.ndarray:
    values = tensor.data or []
    if tensor.datatype == "BYTES":
        return np.array([str(each).encode() for each in values], dtype=object).reshape(tensor.shape)
    dtype = np.dtype(np.float32) if tensor.datatype == "BF16" else NUMPY_DTYPES[tensor.datatype]
    if dtype.kind == "f":
        values = [np.nan if each is None else each for each in values]
    return np.array(values, dtype=dtype).reshape(tensor.shape)
