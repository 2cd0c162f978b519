"""Requests of gRPC that differ from an earlier one in their elements alone: read without taking the message apart.

A client asks much the same again and again. Where all bytes of a request but those of its raw tensors are, at the same
places, those of an earlier one, it is the same message with other elements: what it asks, its names and its shapes have
been read and found right, and its arrays are views of its bytes. (To take it apart and to put its answer together was
half of what the application took for a small request, and copied what was large: docs/log.)

Called by `grpc_service`, on one event loop. Requests with an id of their own, or with typed contents, have no layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from shoal.open_inference import inference_pb2 as pb
from shoal.open_inference.binary_tensors import from_binary
from shoal.serve.grpc.codec import DecodedInputs, GrpcCodec, InferRequestHeader, encode_field_head

MAX_LAYOUTS = 256
MAX_LAYOUTS_PER_LENGTH = 8  # each costs a comparison
MAX_HEAD_BYTES = 4096
MAX_SEEN_HEADS = 256
RAW_INPUT_KEY = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number << 3 | 2


@dataclass(frozen=True, slots=True)
class RequestLayout:
    """The bytes that requests have in common, and what those mean.

    head:    all before the first tensor's elements
    between: what stands before the elements of each other tensor, and where
    tensors: name, datatype and shape of each, and where its elements begin and end
    codec:   whose inputs these are; it has accepted them
    """

    asked: InferRequestHeader
    codec: GrpcCodec
    head: bytes
    between: Sequence[tuple[int, bytes]]
    tensors: Sequence[tuple[str, str, list[int], int, int]]
    num_rows: int
    wanted: frozenset[str] | None
    outputs: tuple[str, ...]
    raw_sizes: tuple[int, ...]

    def matches(self, content: bytes) -> bool:
        """Whether a message of the same length differs in elements alone."""
        return content.startswith(self.head) and all(content.startswith(piece, at) for at, piece in self.between)

    def decode_inputs(self, content: bytes) -> DecodedInputs:
        """The arrays of such a message, as views of it. Raises InferenceError (422) for elements that are none."""
        view = memoryview(content)
        arrays = {
            name: from_binary(name, datatype, shape, view[begin:end])
            for name, datatype, shape, begin, end in self.tensors
        }
        return DecodedInputs(arrays, self.num_rows, self.wanted, self.outputs, self.raw_sizes)


@dataclass(slots=True)
class RequestLayoutCache:
    """Those of requests whose beginning was seen before: what never comes again is not worth keeping."""

    _by_length: dict[int, list[RequestLayout]] = field(default_factory=dict)
    _num_layouts: int = 0
    _seen: set[tuple[int, bytes]] = field(default_factory=set)

    def find(self, content: bytes) -> RequestLayout | None:
        """The layout of a request, if it is known."""
        same = self._by_length.get(len(content), [])
        for index, layout in enumerate(same):
            if layout.matches(content):
                if index:  # it is looked at first the next time
                    same.insert(0, same.pop(index))
                return layout
        return None

    def learn(
        self,
        content: bytes,
        request: pb.ModelInferRequest,
        asked: InferRequestHeader,
        codec: GrpcCodec,
        inputs: DecodedInputs,
    ) -> None:
        """`request`, read from `content`, had no layout, and `codec` has found it right."""
        if asked.id or not inputs.raw_sizes:
            return
        pieces = [encode_field_head(RAW_INPUT_KEY, size) for size in inputs.raw_sizes]
        begin = len(content) - sum(map(len, pieces)) - sum(inputs.raw_sizes)
        if begin > MAX_HEAD_BYTES or not self._has_seen(content, begin):
            return
        layout = _build_layout(content, begin, pieces, request, asked, codec, inputs)
        if layout is None:
            return
        if self._num_layouts == MAX_LAYOUTS:
            self._by_length.clear()
            self._num_layouts = 0
        same = self._by_length.setdefault(len(content), [])
        # One that was learnt by a codec that is gone leaves its place.
        kept = [each for each in same if not each.matches(content)][: MAX_LAYOUTS_PER_LENGTH - 1]
        self._num_layouts += 1 + len(kept) - len(same)
        self._by_length[len(content)] = [layout, *kept]

    def _has_seen(self, content: bytes, begin: int) -> bool:
        """Whether one as long began like this; the next one has."""
        beginning = len(content), content[:begin]
        if beginning in self._seen:
            return True
        if len(self._seen) == MAX_SEEN_HEADS:
            self._seen.clear()
        self._seen.add(beginning)
        return False


def _build_layout(
    content: bytes,
    begin: int,
    pieces: Sequence[bytes],
    request: pb.ModelInferRequest,
    asked: InferRequestHeader,
    codec: GrpcCodec,
    inputs: DecodedInputs,
) -> RequestLayout | None:
    """None when the elements are not the last fields of the message, as its usual form has them.

    begin:  where they would begin
    pieces: what would stand before those of each tensor
    """
    head = b""
    between: list[tuple[int, bytes]] = []
    tensors: list[tuple[str, str, list[int], int, int]] = []
    for tensor, piece, size in zip(request.inputs, pieces, inputs.raw_sizes, strict=True):
        if not content.startswith(piece, begin):
            return None
        between.append((begin, piece))
        begin += len(piece)
        if not head:
            head = content[:begin]
        tensors.append((tensor.name, tensor.datatype, list(tensor.shape), begin, begin + size))
        begin += size
    if not _is_complete_message(content[: between[0][0]]):
        return None
    rest = inputs.num_rows, inputs.wanted, inputs.outputs, inputs.raw_sizes
    return RequestLayout(asked, codec, head, between[1:], tensors, *rest)


def _is_complete_message(beginning: bytes) -> bool:
    """Whether a message may end here, with no tensor before."""
    try:
        return not pb.ModelInferRequest.FromString(beginning).raw_input_contents
    except DecodeError:
        return False
