"""Decodes the bodies of inference requests over HTTP into arrays, and encodes outputs.

`HttpCodec`: tensors in JSON, in binary, or in a mixture. `RowCodec`: rows, whose fields `open_inference.rows` lists: an
object gets one, a list of them a list. Called by `app`, one of each for each model. Knows of HTTP the headers
of an answer, and the length of the JSON object before the tensors' bytes (Inference-Header-Content-Length). Errors are
InferenceErrors: 400 for an invalid request, 422 for a tensor that does not fit, or a row, then with its `field`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from urllib.parse import quote

import msgspec
import numpy as np

from shoal.errors import DataError, InferenceError
from shoal.open_inference.binary_tensors import from_binary, to_binary
from shoal.open_inference.datatypes import NUMPY_DTYPES
from shoal.open_inference.json_tensors import from_json, to_json
from shoal.open_inference.messages import (
    NO_DATA,
    InferRequest,
    InferResponse,
    InputTensor,
    OutputTensor,
    Parameters,
    TensorMetadata,
)
from shoal.open_inference.request_schema import REFUSED_PARAMETERS, RequestSchema
from shoal.open_inference.rows import decode_rows, encode_rows, list_fields
from shoal.serve.http.response import BINARY_TYPE, JSON_TYPE, RestResponse
from shoal.serve.messages.infer_call import Arrays, InferCall

NO_PARAMETERS: Parameters = {}

_decode_request = msgspec.json.Decoder(InferRequest).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class ModelCodec:
    """What decodes requests to one model, and encodes its answers. For any thread. `max_rows`, `batch_dim`: see
    `RequestSchema`."""

    def __init__(
        self,
        model_name: str,
        inputs: Sequence[TensorMetadata],
        outputs: Sequence[TensorMetadata],
        max_rows: int,
        batch_dim: Mapping[str, int | None] | None = None,
    ) -> None:
        self._model_name = model_name
        self._inputs = inputs
        self._outputs = outputs
        self._max_rows = 0 if batch_dim else max_rows  # of those in the first dimension
        self._schema = RequestSchema(inputs, outputs, max_rows, batch_dim)

    @cached_property
    def has_bytes_inputs(self) -> bool:
        """Whether elements of a request are read one by one."""
        return any(spec.datatype == "BYTES" for spec in self._inputs)


class HttpCodec(ModelCodec):
    """Requests and answers of tensors."""

    @cached_property
    def _columns(self) -> frozenset[str]:
        return frozenset(spec.name for spec in self._inputs if spec.kind)

    def decode(self, body: bytes, header_length: int | None = None) -> InferCall:
        """Decode a request. `header_length`: of the JSON object, when bytes of tensors follow it.

        The arrays of binary tensors are views of `body`. Raises InferenceError (400, 422).
        """
        if header_length == 0:
            return self._decode_raw(body)
        rest = memoryview(b"")
        if header_length is not None:
            if header_length > len(body):
                problem = f"Inference-Header-Content-Length = {header_length}: the body has {len(body)} bytes"
                raise InferenceError(400, problem)
            rest = memoryview(body)[header_length:]
        try:
            request = _decode_request(body if header_length is None else memoryview(body)[:header_length])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InferenceError(400, f"not an inference request: {error}") from None
        arrays: dict[str, np.ndarray] = {}
        for tensor in request.inputs:
            self._schema.check_tensor(tensor.name, tensor.datatype, tensor.shape, arrays)
            size = None if tensor.parameters is None else _read_binary_size(tensor, len(rest))
            if (size is None) == (tensor.data is NO_DATA):
                remedy = "give data, or binary_data_size and the bytes after the JSON object; one of both"
                raise InferenceError(400, f"not an inference request: input {tensor.name!r}: {remedy}")
            if size is None:
                has_gaps = tensor.name in self._columns
                array = from_json(tensor.name, tensor.datatype, tensor.shape, tensor.data, has_gaps=has_gaps)
            else:
                array = from_binary(tensor.name, tensor.datatype, tensor.shape, rest[:size])
                rest = rest[size:]
            arrays[tensor.name] = self._schema.to_input_dtype(tensor.name, array)
        if len(rest):
            raise InferenceError(400, f"the body has {len(rest)} bytes after the last tensor")
        num_rows, parameters = self._schema.check_complete(arrays), request.parameters or NO_PARAMETERS
        binary = _get_flag(parameters, "binary_data_output", False)
        outputs: frozenset[str] | None = None
        binary_of: dict[str, bool] = {}
        if request.outputs:
            outputs = self._schema.check_outputs(output.name for output in request.outputs)
            for output in request.outputs:
                of_output = output.parameters or NO_PARAMETERS
                _reject_parameters(of_output, f"output {output.name!r}")
                binary_of[output.name] = _get_flag(of_output, "binary_data", binary)
        return InferCall(
            arrays,
            num_rows,
            outputs,
            request.id,
            parameters.get("timeout"),
            parameters.get("action"),
            parameters.get("seed"),
            binary,
            binary_of,
        )

    def encode(self, request: InferCall, arrays: Arrays, version: int) -> RestResponse:
        """Encode the JSON object of the answer, and the bytes of its binary tensors (views of the arrays), in order.

        Raises InferenceError (422) for an output that JSON cannot represent.
        """
        tensors: list[OutputTensor] = []
        parts: list[memoryview | bytes] = []
        for spec in self._outputs:
            name, datatype = spec.name, spec.datatype
            if request.outputs is not None and name not in request.outputs:
                continue
            array = arrays[name]
            assert array.dtype == NUMPY_DTYPES[datatype], f"output {name!r}: expected {datatype}, got {array.dtype}"
            if request.binary_of.get(name, request.binary):
                part = to_binary(datatype, array)
                parts.append(part)
                tensors.append(OutputTensor(name, list(array.shape), datatype, {"binary_data_size": len(part)}))
            else:
                data = to_json(name, datatype, array)
                tensors.append(OutputTensor(name, list(array.shape), datatype, None, data))
        body = _encode(InferResponse(self._model_name, str(version), tensors, request.id))
        headers = [(b"shoal-model-version", b"%d" % version)]
        if parts:
            headers.append((b"inference-header-content-length", b"%d" % len(body)))
        return RestResponse(200, body, BINARY_TYPE if parts else JSON_TYPE, headers, parts)

    def _decode_raw(self, body: bytes) -> InferCall:
        """Decode a raw body: one row of the only input; the answer is binary."""
        inputs = list(self._schema.inputs.values())
        if len(inputs) != 1:
            names = ", ".join(map(repr, self._schema.inputs))
            raise InferenceError(
                400, f"Inference-Header-Content-Length = 0 is for models of one input; here are {names}"
            )
        spec = inputs[0]
        shape, dimension = list(spec.shape), self._schema.batch_dim[spec.name]
        if dimension is not None:
            shape[dimension] = 1
        if spec.datatype == "BYTES" and shape != [1] * len(shape):
            raise InferenceError(400, f"input {spec.name!r}: the raw body of BYTES is one element, got {spec.shape}")
        if shape.count(-1) > 1:
            raise InferenceError(400, f"input {spec.name!r}: the shape of a raw body is unknown: {spec.shape}")
        if spec.datatype == "BYTES":
            array = np.empty(1, dtype=object)
            array[0] = body
            array = array.reshape(shape)
        else:
            row_bytes = NUMPY_DTYPES[spec.datatype].itemsize
            for size in shape:
                row_bytes *= 1 if size == -1 else size
            shape = [len(body) // row_bytes if size == -1 else size for size in shape]
            array = from_binary(spec.name, spec.datatype, shape, body)
        arrays: dict[str, np.ndarray] = {}
        self._schema.check_tensor(spec.name, spec.datatype, shape, arrays)
        return InferCall({spec.name: array}, 1, binary=True)


class RowsRequest(InferCall, gc=False):
    """Rows as tensors. `is_single`: of one object, not of a list. `ignored`: fields of the first that no input has."""

    is_single: bool = False
    ignored: str = ""


class RowCodec(ModelCodec):
    """Requests and answers of rows."""

    has_bytes_inputs = True  # a body is read value by value

    @cached_property
    def _fields(self) -> Collection[str]:
        return list_fields(self._inputs)

    def decode(self, body: bytes, header_length: int | None = None) -> RowsRequest:
        """Decode a request. Raises InferenceError (400, 413, 422)."""
        if not self._max_rows:
            problem = f"model {self._model_name!r} has no batch in the first dimension of its tensors, so no rows"
            raise InferenceError(400, f"{problem}: send it tensors (.../infer)")
        try:
            content = _decode_any(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InferenceError(400, f"not a row: {error}") from None
        rows = content if isinstance(content, list) else [content]
        if not 0 < len(rows) <= self._max_rows:
            raise InferenceError(422, f"expected 1 to {self._max_rows} rows, got {len(rows)}")
        arrays: Arrays
        try:
            arrays = decode_rows(self._inputs, rows)
        except DataError as error:
            raise InferenceError(422, str(error), field=error.field) from None
        for spec in self._inputs:
            if not spec.kind:
                self._schema.check_tensor(spec.name, spec.datatype, arrays[spec.name].shape, {})
        ignored = ", ".join(name for name in rows[0] if name.removeprefix("\ufeff") not in self._fields)
        return RowsRequest(arrays, len(rows), is_single=content is not rows, ignored=ignored[:300])

    def encode(self, request: InferCall, arrays: Arrays, version: int) -> RestResponse:
        """Encode the rows of the answer. Raises InferenceError (422) for an output that JSON cannot represent."""
        assert isinstance(request, RowsRequest)
        rows = encode_rows(self._outputs, arrays)
        body, headers = _encode(rows[0] if request.is_single else rows), [(b"shoal-model-version", b"%d" % version)]
        if request.ignored:
            headers.append((b"shoal-ignored-fields", quote(request.ignored, ", ", errors="replace").encode()))
        return RestResponse(200, body, headers=headers)


def _read_binary_size(tensor: InputTensor, available_bytes: int) -> int | None:
    """The number of bytes after the JSON object for this tensor; None when its data is in the JSON."""
    parameters = tensor.parameters or NO_PARAMETERS
    _reject_parameters(parameters, f"input {tensor.name!r}")
    size = parameters.get("binary_data_size")
    if size is None:
        return None
    if type(size) is not int or not 0 <= size <= available_bytes:
        expected = f"expected at most {available_bytes}, which is the number after the JSON object"
        raise InferenceError(400, f"input {tensor.name!r}: binary_data_size = {str(size)[:40]}: {expected}")
    return size


def _reject_parameters(parameters: Parameters, where: str) -> None:
    for parameter in REFUSED_PARAMETERS:
        if parameters.get(parameter):
            raise InferenceError(400, f"{where}: the parameter {parameter!r} is of an extension that is not served")


def _get_flag(parameters: Parameters, name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InferenceError(400, f"parameter {name} = {str(value)[:40]}: expected true or false")
    return value
