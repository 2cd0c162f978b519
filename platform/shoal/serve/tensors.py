"""Tensors in JSON, as the Open Inference Protocol v2 writes them: decode, check against the signature, encode.

Called by `open_inference`. Pure functions of bytes and arrays: no HTTP, no torch, no state but compiled decoders.
Every complaint is an InferenceError: 400 for what is not a request, 422 for a tensor that does not fit, naming the
tensor, what was expected and what came.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from shoal.errors import ConfigError, InferenceError
from shoal.registry.manifest import Signature, TensorSignature

# datatype -> (numpy, what a JSON element must be)
DTYPES: dict[str, tuple[type[np.generic], type]] = {
    "BOOL": (np.bool_, bool),
    "UINT8": (np.uint8, int),
    "UINT16": (np.uint16, int),
    "UINT32": (np.uint32, int),
    "UINT64": (np.uint64, int),
    "INT8": (np.int8, int),
    "INT16": (np.int16, int),
    "INT32": (np.int32, int),
    "INT64": (np.int64, int),
    "FP16": (np.float16, float),
    "FP32": (np.float32, float),
    "FP64": (np.float64, float),
}
MAX_DEPTH = 8


class RequestTensor(msgspec.Struct):
    """One input. `data` stays raw until the datatype is known; flat (row-major) or nested."""

    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw


class RequestedOutput(msgspec.Struct):
    """An output that the client asks for; without any, it gets them all."""

    name: str


class InferRequest(msgspec.Struct):
    """The body of an inference request."""

    inputs: list[RequestTensor]
    id: str | None = None
    outputs: list[RequestedOutput] | None = None


class ResponseTensor(msgspec.Struct):
    """One output; `data` is flat, row-major. A value that JSON cannot write (NaN, infinity) becomes null."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any]


class InferResponse(msgspec.Struct, omit_defaults=True):
    """The body of an answer."""

    model_name: str
    model_version: str
    outputs: list[ResponseTensor]
    id: str | None = None


_decode_request = msgspec.json.Decoder(InferRequest).decode
_encode = msgspec.json.Encoder().encode


class TensorCodec:
    """Reads requests for, and writes answers of, a model with this signature.

    Raises ConfigError for a datatype that JSON requests cannot carry.
    """

    def __init__(self, signature: Signature) -> None:
        for tensor in (*signature.inputs, *signature.outputs):
            if tensor.datatype not in DTYPES:
                raise ConfigError("signature.datatype", tensor.datatype, f"tensor {tensor.name!r} cannot be served")
        self._inputs = {tensor.name: tensor for tensor in signature.inputs}
        self._outputs = [(spec.name, spec.datatype, np.dtype(DTYPES[spec.datatype][0])) for spec in signature.outputs]
        self._output_names = frozenset(spec.name for spec in signature.outputs)

    def decode(self, body: bytes) -> tuple[InferRequest, dict[str, np.ndarray], int]:
        """The request, its inputs by name, and its number of rows. Raises InferenceError (400, 422)."""
        try:
            request = _decode_request(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InferenceError(400, f"not an inference request: {error}") from None
        arrays: dict[str, np.ndarray] = {}
        num_rows = -1
        for tensor in request.inputs:
            spec = self._inputs.get(tensor.name)
            if spec is None:
                expected = ", ".join(map(repr, self._inputs))
                raise InferenceError(422, f"input {tensor.name!r} is unknown: expected {expected}")
            if tensor.name in arrays:
                raise InferenceError(422, f"input {tensor.name!r} was given twice")
            arrays[tensor.name] = _array(tensor, spec)
            if num_rows not in (-1, tensor.shape[0]):
                raise InferenceError(422, f"input {tensor.name!r}: expected {num_rows} rows, got {tensor.shape[0]}")
            num_rows = tensor.shape[0]
        if len(arrays) != len(self._inputs):
            missing = next(name for name in self._inputs if name not in arrays)
            raise InferenceError(422, f"input {missing!r} is missing: expected {describe(self._inputs[missing])}")
        if request.outputs is not None:
            for output in request.outputs:
                if output.name not in self._output_names:
                    expected = ", ".join(repr(name) for name, _, _ in self._outputs)
                    raise InferenceError(422, f"output {output.name!r} is unknown: expected {expected}")
        return request, arrays, num_rows

    def encode(self, request: InferRequest, model_name: str, version: int, outputs: Mapping[str, np.ndarray]) -> bytes:
        """The answer's body, with the outputs that were asked for."""
        wanted = None if not request.outputs else {output.name for output in request.outputs}
        tensors = []
        for name, datatype, dtype in self._outputs:
            if wanted is None or name in wanted:
                array = outputs[name]
                if array.dtype != dtype:
                    array = array.astype(dtype)
                tensors.append(ResponseTensor(name, list(array.shape), datatype, array.ravel().tolist()))
        return _encode(InferResponse(model_name, str(version), tensors, request.id))


def describe(spec: TensorSignature) -> str:
    """`FP32 [-1, 64]`."""
    return f"{spec.datatype} {spec.shape}"


def _array(tensor: RequestTensor, spec: TensorSignature) -> np.ndarray:
    shape = tensor.shape
    fits = len(shape) == len(spec.shape) and all(
        have == want or (want == -1 and have > 0) for have, want in zip(shape, spec.shape, strict=True)
    )
    if not fits or tensor.datatype != spec.datatype:
        raise InferenceError(
            422, f"input {tensor.name!r}: expected {describe(spec)}, got {tensor.datatype[:20]} {shape[:MAX_DEPTH]}"
        )
    dtype, element = DTYPES[spec.datatype]
    depth = _depth(tensor.data)
    if not 1 <= depth <= MAX_DEPTH:
        raise InferenceError(422, f"input {tensor.name!r}: expected data as a list of {spec.datatype}")
    try:
        array = np.array(_decoder(element, depth)(tensor.data), dtype=dtype)
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        raise InferenceError(422, f"input {tensor.name!r}: expected data of {spec.datatype}: {error}") from None
    if array.size != math.prod(shape) or (depth > 1 and list(array.shape) != shape):
        raise InferenceError(
            422, f"input {tensor.name!r}: expected {math.prod(shape)} values for shape {shape}, got {list(array.shape)}"
        )
    return array if depth > 1 else array.reshape(shape)


def _depth(data: msgspec.Raw) -> int:
    """How deep lists are nested, read from the opening brackets."""
    head = bytes(memoryview(data)[:64])
    depth = 0
    for byte in head:
        if byte == 0x5B:  # [
            depth += 1
        elif byte not in b" \t\r\n":
            break
    return depth


@functools.cache
def _decoder(element: type, depth: int) -> Any:
    nested: Any = element
    for _ in range(depth):
        nested = list[nested]
    return msgspec.json.Decoder(nested).decode
