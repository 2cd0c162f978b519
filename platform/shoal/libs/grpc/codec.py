"""Decodes a request's protobuf tensors into arrays that fit the model, and encodes outputs into an answer.

Called by `service`, one codec for each model. Elements arrive raw, one blob for each input, or typed, in the datatype's
field. The answer is raw when the request was, and when an output has no typed field. Memory for a declared shape is
allocated only once its bytes are present. Errors are InferenceErrors: 400 for an invalid request, 422 for a tensor that
does not fit, with its name, the expected and the actual type.

An answer is built as the bytes of its message, whose fields may come in any order: the common head of all answers of a
shape and version is built once, and the elements and the request's id follow it.

A client's requests are mostly alike. When all bytes except those of the raw tensors equal an earlier request's at the
same places, the message is the same with other elements (`RequestLayout`): its header, names and shapes are already
checked, and its arrays are views of its bytes. (Parsing it and building its answer was half of the application's time
for a small request, and copied large ones.) Requests with an id or with typed contents have no layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from msgspec.structs import replace

from shoal.errors import InferenceError
from shoal.extend.serve import REFUSED_PARAMETERS, ModelCodec, format_tensor_type, from_binary, to_binary
from shoal.libs.grpc import inference_pb2 as pb
from shoal.open_inference.datatypes import NUMPY_DTYPES
from shoal.serve.messages.infer_call import Arrays, InferCall

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

MAX_HEADS = 256  # of answers, retained for each model
# Keys of fields: the field's number and the wire type for a length.
ID_KEY, RAW_OUTPUT_KEY = (
    pb.ModelInferResponse.DESCRIPTOR.fields_by_name[name].number << 3 | 2 for name in ("id", "raw_output_contents")
)

InputTensorMessage = pb.ModelInferRequest.InferInputTensor


class GrpcInferCall(InferCall, gc=False):
    """A request. `binary`: whether its tensors are raw.

    names:     of the requested outputs, in the request's order; () for all
    raw_sizes: the bytes of each tensor's elements, in the request's order; () unless they are raw
    """

    names: tuple[str, ...] = ()
    raw_sizes: tuple[int, ...] = ()


class GrpcCodec(ModelCodec):
    """Requests and answers as messages."""

    @cached_property
    def _datatypes(self) -> dict[str, str]:
        return {spec.name: spec.datatype for spec in self._outputs}

    @cached_property
    def _heads(self) -> dict[tuple[int, tuple[tuple[str, tuple[int, ...]], ...]], bytes]:
        return {}

    def decode(self, request: pb.ModelInferRequest) -> GrpcInferCall:
        """Decode a request; raw arrays are views of the request's bytes. Raises InferenceError (400, 422)."""
        raw = request.raw_input_contents
        if raw and len(raw) != len(request.inputs):
            problem = f"raw_input_contents has {len(raw)} entries for {len(request.inputs)} inputs"
            raise InferenceError(400, f"{problem}: expected one for each, or none and typed contents")
        arrays: dict[str, np.ndarray] = {}
        sizes: list[int] = []
        for index, tensor in enumerate(request.inputs):
            name, shape = tensor.name, list(tensor.shape)
            self._schema.check_tensor(name, tensor.datatype, shape, arrays)
            _reject_parameters(tensor.parameters, f"input {name!r}")
            if raw:
                if tensor.HasField("contents"):
                    raise InferenceError(400, f"input {name!r}: expected contents or raw_input_contents, got both")
                elements = raw[index]  # each access copies it from its message
                sizes.append(len(elements))
                arrays[name] = from_binary(name, tensor.datatype, shape, elements)
            else:
                arrays[name] = _decode_typed(tensor, shape)
            arrays[name] = self._schema.to_input_dtype(name, arrays[name])
        wanted = self._schema.check_outputs(output.name for output in request.outputs)
        names = tuple([output.name for output in request.outputs])  # never more than present: checked above
        for output in request.outputs:
            _reject_parameters(output.parameters, f"output {output.name!r}")
        timeout_us, action, seed = (
            parameter_value(request.parameters[name]) if name in request.parameters else None
            for name in ("timeout", "action", "seed")
        )
        num_rows = self._schema.check_complete(arrays)
        return GrpcInferCall(
            arrays,
            num_rows,
            wanted,
            request.id,
            timeout_us,
            action,
            seed,
            bool(raw),
            names=names,
            raw_sizes=tuple(sizes),
        )

    def encode(self, call: GrpcInferCall, outputs: Arrays, version: int) -> bytes:
        """Encode a ModelInferResponse with the requested outputs, in their order, or all in the model's."""
        names = call.names or tuple(self._datatypes)
        arrays = [(name, self._datatypes[name], outputs[name]) for name in names]
        for name, datatype, array in arrays:
            assert array.dtype == NUMPY_DTYPES[datatype], f"output {name!r}: expected {datatype}, got {array.dtype}"
        parts: list[bytes | memoryview] = []
        if call.binary or any(datatype not in FIELDS for _, datatype, _ in arrays):
            shapes = version, tuple([(name, array.shape) for name, _, array in arrays])
            head = self._heads.get(shapes)
            if head is None:
                if len(self._heads) >= MAX_HEADS:  # or one more when two threads add one
                    self._heads.clear()
                head = self._heads[shapes] = self._build_head(version, arrays).SerializeToString()
            parts.append(head)
            for _, datatype, array in arrays:
                part = to_binary(datatype, array)
                parts += (encode_field_head(RAW_OUTPUT_KEY, len(part)), part)
        else:
            answer = self._build_head(version, arrays)
            for tensor, (_, datatype, array) in zip(answer.outputs, arrays, strict=True):
                getattr(tensor.contents, FIELDS[datatype]).extend(array.ravel().tolist())
            parts.append(answer.SerializeToString())
        if call.id:
            identifier = call.id.encode()
            parts += (encode_field_head(ID_KEY, len(identifier)), identifier)
        return b"".join(parts)

    def _build_head(self, version: int, arrays: Sequence[tuple[str, str, np.ndarray]]) -> pb.ModelInferResponse:
        """Build an answer without its elements and its id."""
        answer = pb.ModelInferResponse(model_name=self._model_name, model_version=str(version))
        for name, datatype, array in arrays:
            answer.outputs.add(name=name, datatype=datatype, shape=array.shape)
        return answer


def parameter_value(parameter: pb.InferParameter | pb.ModelRepositoryParameter) -> Any:
    """A parameter's value; None when it is empty."""
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)


@lru_cache(1024)
def encode_field_head(key: int, size_bytes: int) -> bytes:
    """The bytes before a field's content: its key, of one byte, and the length, seven bits in each byte."""
    head = bytearray((key,))
    while size_bytes > 127:
        head.append(size_bytes & 127 | 128)
        size_bytes >>= 7
    head.append(size_bytes)
    return bytes(head)


def _decode_typed(tensor: InputTensorMessage, shape: list[int]) -> np.ndarray:
    field = FIELDS.get(tensor.datatype)
    if field is None:
        raise InferenceError(422, f"input {tensor.name!r}: expected {tensor.datatype} in raw_input_contents")
    elements = getattr(tensor.contents, field)
    size = 1
    for each in shape:
        size *= each
    if len(elements) != size:
        problem = (
            f"input {tensor.name!r}: expected {size} values in {field} for {format_tensor_type(tensor.datatype, shape)}"
        )
        raise InferenceError(422, f"{problem}, got {len(elements)}")
    if tensor.datatype == "BYTES":
        array = np.empty(size, object)
        array[:] = list(elements)
        return array.reshape(shape)
    try:  # from a list: NumPy checks each value, but would truncate those of a buffer
        return np.array(list(elements), NUMPY_DTYPES[tensor.datatype]).reshape(shape)
    except OverflowError as error:
        raise InferenceError(422, f"input {tensor.name!r}: expected values of {tensor.datatype}: {error}") from None


def _reject_parameters(parameters: Mapping[str, pb.InferParameter], where: str) -> None:
    for name in REFUSED_PARAMETERS:
        if name in parameters:
            raise InferenceError(400, f"{where}: the parameter {name!r} is of an extension that is not served")


MAX_LAYOUTS = 256
MAX_LAYOUTS_PER_LENGTH = 8  # each costs one comparison
MAX_HEAD_BYTES = 4096
MAX_SEEN_HEADS = 256
RAW_INPUT_KEY = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number << 3 | 2


@dataclass(frozen=True, slots=True)
class RequestLayout:
    """The bytes that requests have in common, and their meaning.

    head:    the bytes before the first tensor's elements
    between: the bytes before the elements of each other tensor, and their place
    tensors: name, datatype and shape of each, and the bounds of its elements
    codec:   the codec that has accepted these inputs
    message: such a request without its elements
    call:    such a call without its arrays
    """

    codec: GrpcCodec
    message: pb.ModelInferRequest
    call: GrpcInferCall
    head: bytes
    between: Sequence[tuple[int, bytes]]
    tensors: Sequence[tuple[str, str, list[int], int, int]]

    def matches(self, content: bytes) -> bool:
        """Whether a message of the same length differs only in its elements."""
        return content.startswith(self.head) and all(content.startswith(piece, at) for at, piece in self.between)

    def decode(self, content: bytes) -> GrpcInferCall:
        """Decode the arrays of such a message, as views of it. Raises InferenceError (422) for invalid elements."""
        view = memoryview(content)
        arrays = {
            name: from_binary(name, datatype, shape, view[begin:end])
            for name, datatype, shape, begin, end in self.tensors
        }
        return replace(self.call, inputs=arrays)


@dataclass(slots=True)
class RequestLayoutCache:
    """The layouts of requests whose beginning occurred at least twice; a single one is not worth retaining."""

    _by_length: dict[int, list[RequestLayout]] = field(default_factory=dict)
    _num_layouts: int = 0
    _seen: set[tuple[int, bytes]] = field(default_factory=set)

    def find(self, content: bytes) -> RequestLayout | None:
        """The layout of a request, if it is known."""
        same = self._by_length.get(len(content), [])
        for index, layout in enumerate(same):
            if layout.matches(content):
                if index:  # it is checked first the next time
                    same.insert(0, same.pop(index))
                return layout
        return None

    def learn(self, content: bytes, request: pb.ModelInferRequest, codec: GrpcCodec, call: GrpcInferCall) -> None:
        """Learn the layout of `request`, parsed from `content` and accepted by `codec`."""
        if call.id or not call.raw_sizes:
            return
        pieces = [encode_field_head(RAW_INPUT_KEY, size) for size in call.raw_sizes]
        begin = len(content) - sum(map(len, pieces)) - sum(call.raw_sizes)
        if begin > MAX_HEAD_BYTES:
            return
        if (beginning := (len(content), content[:begin])) not in self._seen:
            if len(self._seen) == MAX_SEEN_HEADS:
                self._seen.clear()
            self._seen.add(beginning)
            return
        layout = _build_layout(content, begin, pieces, request, codec, call)
        if layout is None:
            return
        if self._num_layouts == MAX_LAYOUTS:
            self._by_length.clear()
            self._num_layouts = 0
        same = self._by_length.setdefault(len(content), [])
        # A layout of a former codec is dropped.
        others = [each for each in same if not each.matches(content)][: MAX_LAYOUTS_PER_LENGTH - 1]
        self._num_layouts += 1 + len(others) - len(same)
        self._by_length[len(content)] = [layout, *others]


def _build_layout(
    content: bytes,
    begin: int,
    pieces: Sequence[bytes],
    request: pb.ModelInferRequest,
    codec: GrpcCodec,
    call: GrpcInferCall,
) -> RequestLayout | None:
    """Build a layout; None when the elements are not the last fields of the message, as usual, or need a conversion.

    begin:  where the elements would begin
    pieces: the expected bytes before each tensor's elements
    """
    head = b""
    between: list[tuple[int, bytes]] = []
    tensors: list[tuple[str, str, list[int], int, int]] = []
    for tensor, piece, size in zip(request.inputs, pieces, call.raw_sizes, strict=True):
        if not content.startswith(piece, begin) or call.inputs[tensor.name].dtype != NUMPY_DTYPES[tensor.datatype]:
            return None
        between.append((begin, piece))
        begin += len(piece)
        if not head:
            head = content[:begin]
        tensors.append((tensor.name, tensor.datatype, list(tensor.shape), begin, begin + size))
        begin += size
    try:  # whether a message without tensors may end here
        message = pb.ModelInferRequest.FromString(content[: between[0][0]])
    except DecodeError:
        return None
    if message.raw_input_contents:
        return None
    return RequestLayout(codec, message, replace(call, inputs={}), head, between[1:], tensors)
