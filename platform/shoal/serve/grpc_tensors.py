"""Tensors in protobuf messages: a request's into arrays, checked against the model's signature; answers from arrays.

Called by `grpc_service`. Pure functions. Elements come raw, one blob for each input, or typed, in the field that the
datatype has; the answer is raw when the request was, and when an output has no typed field. Every complaint is an
InferenceError: 400 for what is not a request, 422 for a tensor that does not fit, naming it, what was expected and what
came, 413 for one that is too large.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.errors import InferenceError
from shoal.open_inference import inference_pb2 as pb
from shoal.open_inference.datatypes import NUMPY
from shoal.registry.manifest import Signature, TensorSignature
from shoal.serve.call import Prediction
from shoal.serve.limits import Limits

# The field of InferTensorContents that holds the elements; FP16 and BF16 travel raw only.
FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}

# Parameters of extensions that clients know, and that would change what an answer means.
NOT_SERVED = {
    "classification": "ask for the scores, and choose from them",
    "shared_memory_region": "send and receive tensors in the messages",
    "shared_memory_offset": "send and receive tensors in the messages",
    "shared_memory_byte_size": "send and receive tensors in the messages",
}
_LENGTH = struct.Struct("<I")


def read_inputs(
    request: pb.ModelInferRequest, signature: Signature, limits: Limits
) -> tuple[dict[str, np.ndarray], int]:
    """The inputs by name, and how many rows each has. Arrays may be views of the request's bytes, and read-only.

    Raises InferenceError (400, 413, 422).
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InferenceError(
            400, f"raw_input_contents has {len(raw)} entries for {len(request.inputs)} inputs: expected one for each"
        )
    specs = {spec.name: spec for spec in signature.inputs}
    arrays: dict[str, np.ndarray] = {}
    num_rows = -1
    for index, tensor in enumerate(request.inputs):
        spec = specs.get(tensor.name)
        if spec is None:
            raise InferenceError(422, f"input {tensor.name[:200]!r} is unknown: expected {_names(signature.inputs)}")
        if tensor.name in arrays:
            raise InferenceError(422, f"input {tensor.name!r} was given twice")
        refuse_parameters(f"input {tensor.name!r}", tensor.parameters)
        shape = list(tensor.shape)
        _check_fit(tensor, shape, spec)
        num_elements = limits.check_shape(tensor.name, shape)
        array = _from_raw(raw[index], tensor, num_elements) if raw else _from_typed(tensor, num_elements)
        arrays[tensor.name] = array.reshape(shape)
        if num_rows not in (-1, shape[0]):
            raise InferenceError(422, f"input {tensor.name!r}: expected {num_rows} rows, got {shape[0]}")
        num_rows = shape[0]
    if len(arrays) != len(specs):
        missing = next(spec for name, spec in specs.items() if name not in arrays)
        raise InferenceError(422, f"input {missing.name!r} is missing: expected {_described(missing)}")
    return arrays, num_rows


def read_outputs(request: pb.ModelInferRequest, signature: Signature) -> frozenset[str] | None:
    """The names of the outputs that are asked for; None for all. Raises InferenceError (400, 422)."""
    names = {spec.name for spec in signature.outputs}
    for output in request.outputs:
        if output.name not in names:
            raise InferenceError(422, f"output {output.name[:200]!r} is unknown: expected {_names(signature.outputs)}")
        refuse_parameters(f"output {output.name!r}", output.parameters)
    return frozenset(output.name for output in request.outputs) or None


def refuse_parameters(where: str, parameters: Any) -> None:
    """Raises InferenceError (400) for parameters of extensions that are not served, and whose loss would be felt."""
    for name in parameters:
        if name in NOT_SERVED:
            raise InferenceError(400, f"{where}: {name} is not served: {NOT_SERVED[name]}")


def write_answer(request: pb.ModelInferRequest, signature: Signature, prediction: Prediction) -> pb.ModelInferResponse:
    """The answer, with its outputs in the order in which they were asked for, else in the signature's."""
    specs = {spec.name: spec for spec in signature.outputs}
    names = [output.name for output in request.outputs] or list(specs)
    raw = bool(request.raw_input_contents) or any(specs[name].datatype not in FIELDS for name in names)
    answer = pb.ModelInferResponse(model_name=request.model_name, model_version=str(prediction.version), id=request.id)
    for name in names:
        datatype, array = specs[name].datatype, prediction.outputs[name]
        tensor = answer.outputs.add(name=name, datatype=datatype, shape=array.shape)
        if raw:
            answer.raw_output_contents.append(_to_raw(array, datatype))
        else:
            getattr(tensor.contents, FIELDS[datatype]).extend(array.ravel().tolist())
    return answer


def _names(specs: Sequence[TensorSignature]) -> str:
    return ", ".join(repr(spec.name) for spec in specs)


def _described(spec: TensorSignature) -> str:
    return f"{spec.datatype} {spec.shape}"


def _check_fit(tensor: pb.ModelInferRequest.InferInputTensor, shape: list[int], spec: TensorSignature) -> None:
    fits = len(shape) == len(spec.shape) and all(
        have == want or (want == -1 and have > 0) for have, want in zip(shape, spec.shape, strict=True)
    )
    if not fits or tensor.datatype != spec.datatype:
        got = f"{tensor.datatype[:20]} {shape[:16]}"
        raise InferenceError(422, f"input {tensor.name!r}: expected {_described(spec)}, got {got}")


def _from_raw(raw: bytes, tensor: pb.ModelInferRequest.InferInputTensor, num_elements: int) -> np.ndarray:
    """The elements in one dimension."""
    if tensor.HasField("contents"):
        raise InferenceError(400, f"input {tensor.name!r} has contents, and raw_input_contents too: expected one")
    if tensor.datatype == "BYTES":
        return _read_elements(raw, tensor.name, num_elements)
    dtype = NUMPY[tensor.datatype]
    if len(raw) != num_elements * dtype.itemsize:
        expected = f"{num_elements * dtype.itemsize} bytes for {tensor.datatype} {list(tensor.shape)}"
        raise InferenceError(422, f"input {tensor.name!r}: expected {expected}, got {len(raw)}")
    if tensor.datatype == "BOOL":
        return np.frombuffer(raw, np.uint8) != 0  # any other byte would be neither true nor false to NumPy
    return np.frombuffer(raw, dtype)


def _read_elements(raw: bytes, name: str, num_elements: int) -> np.ndarray:
    elements: list[bytes] = []
    position = 0
    while position < len(raw) and len(elements) < num_elements:
        if position + 4 > len(raw):
            break
        (length,) = _LENGTH.unpack_from(raw, position)
        position += 4 + length
        elements.append(raw[position - length : position])
    if position != len(raw) or len(elements) != num_elements:
        raise InferenceError(
            422, f"input {name!r}: expected {num_elements} elements of BYTES, each after its length in four bytes"
        )
    array = np.empty(num_elements, dtype=object)
    array[:] = elements
    return array


def _from_typed(tensor: pb.ModelInferRequest.InferInputTensor, num_elements: int) -> np.ndarray:
    """The elements in one dimension."""
    field = FIELDS.get(tensor.datatype)
    if field is None:
        raise InferenceError(422, f"input {tensor.name!r}: {tensor.datatype} is sent in raw_input_contents only")
    elements = getattr(tensor.contents, field)
    if len(elements) != num_elements:
        raise InferenceError(
            422, f"input {tensor.name!r}: expected {num_elements} values in {field}, got {len(elements)}"
        )
    dtype = NUMPY[tensor.datatype]
    if tensor.datatype == "BYTES":
        array = np.empty(num_elements, dtype=object)
        array[:] = list(elements)
        return array
    try:
        return np.array(list(elements), dtype=dtype)
    except OverflowError as error:
        raise InferenceError(422, f"input {tensor.name!r}: expected values of {tensor.datatype}: {error}") from None


def _to_raw(array: np.ndarray, datatype: str) -> bytes:
    if datatype == "BYTES":
        return b"".join(part for each in array.flat for part in (_LENGTH.pack(len(each)), each))
    return np.ascontiguousarray(array, dtype=NUMPY[datatype]).tobytes()
