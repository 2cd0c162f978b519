"""Decodes gRPC requests that differ from an earlier one only in their elements, without parsing the message.

A client's requests are mostly alike. When all bytes except those of the raw tensors equal an earlier request's at the
same places, the message is the same with other elements: its header, names and shapes are already checked, and its
arrays are views of its bytes. (Parsing it and building its answer was half of the application's time for a small
request, and copied large ones.)

Called by `service`, on one event loop. Requests with an id or with typed contents have no layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError
from msgspec.structs import replace

from shoal.extend.serve import from_binary
from shoal.libs.grpc import inference_pb2 as pb
from shoal.libs.grpc.codec import GrpcCodec, GrpcInferCall, encode_field_head
from shoal.open_inference.datatypes import NUMPY_DTYPES

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
