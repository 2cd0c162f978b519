"""Tensors in protobuf messages: a request's into arrays that fit the model, outputs into an answer.

Called by `grpc_service`, one codec for each model. Elements come raw, one blob for each input, or typed, in the field
that the datatype has; the answer is raw when the request was, and when an output has no typed field. Nothing is
allocated for what a request declares before its bytes are seen to be there. Complaints are InferenceErrors: 400 for
what is not a request, 422 for a tensor that does not fit, naming it, what was expected and what came.

An answer is made as the bytes of its message, which may come in any order of fields: what all answers of a shape and
version begin with is made once, and the elements and the request's id follow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from shoal.errors import InferenceError
from shoal.open_inference import inference_pb2 as pb
from shoal.open_inference.binary_tensors import from_binary, to_binary
from shoal.open_inference.datatypes import NUMPY
from shoal.open_inference.http_codec import REFUSED_PARAMETERS
from shoal.open_inference.messages import TensorMetadata
from shoal.open_inference.request_schema import Expectation, shown

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

MAX_HEADS = 256  # of answers, kept for each model
# Keys of fields: their number, and that a length follows.
ID, RAW_OUTPUT = (
    pb.ModelInferResponse.DESCRIPTOR.fields_by_name[name].number << 3 | 2 for name in ("id", "raw_output_contents")
)

Input = pb.ModelInferRequest.InferInputTensor


class Asked(msgspec.Struct, frozen=True, gc=False):
    """What a request asks, beside its tensors.

    timeout_us: the parameter `timeout`, whatever it holds; None when there is none
    raw:        whether the tensors came raw
    """

    model: str
    version: str
    id: str
    timeout_us: object
    raw: bool

    @classmethod
    def by(cls, request: pb.ModelInferRequest) -> Asked:
        """What this message asks."""
        return cls(
            request.model_name,
            request.model_version,
            request.id,
            parameter_value(request.parameters["timeout"]) if "timeout" in request.parameters else None,
            bool(request.raw_input_contents),
        )


class Inputs(msgspec.Struct, frozen=True, gc=False):
    """The tensors of a request: by name, the rows of each, and the outputs that are wanted (None for all).

    outputs:   the names of those that are wanted, in the order in which they were asked for; () for all
    raw_sizes: the bytes that the elements of each had, in the request's order; () when they did not come raw
    """

    arrays: dict[str, np.ndarray]
    num_rows: int
    wanted: frozenset[str] | None
    outputs: tuple[str, ...]
    raw_sizes: tuple[int, ...]


class GrpcCodec:
    """Reads requests for, and writes answers of, one model. For any thread."""

    def __init__(
        self, model: str, inputs: Sequence[TensorMetadata], outputs: Sequence[TensorMetadata], max_rows: int
    ) -> None:
        self._model = model
        self._expectation = Expectation(inputs, outputs, max_rows)
        self.takes_bytes = any(spec.datatype == "BYTES" for spec in inputs)  # whose elements are read one by one
        self._datatypes = {spec.name: spec.datatype for spec in outputs}
        self._heads: dict[tuple[int, tuple[tuple[str, tuple[int, ...]], ...]], bytes] = {}

    def decode(self, request: pb.ModelInferRequest) -> Inputs:
        """Arrays that came raw are views of the request's bytes. Raises InferenceError (400, 422)."""
        raw = request.raw_input_contents
        if raw and len(raw) != len(request.inputs):
            problem = f"raw_input_contents has {len(raw)} entries for {len(request.inputs)} inputs"
            raise InferenceError(400, f"{problem}: expected one for each, or none and typed contents")
        arrays: dict[str, np.ndarray] = {}
        sizes: list[int] = []
        for index, tensor in enumerate(request.inputs):
            name, shape = tensor.name, list(tensor.shape)
            self._expectation.declare(name, tensor.datatype, shape, arrays)
            _refuse(tensor.parameters, f"input {name!r}")
            if raw:
                if tensor.HasField("contents"):
                    raise InferenceError(400, f"input {name!r}: expected contents or raw_input_contents, got both")
                elements = raw[index]  # copied, each time that it is taken from its message
                sizes.append(len(elements))
                arrays[name] = from_binary(name, tensor.datatype, shape, elements)
            else:
                arrays[name] = _from_typed(tensor, shape)
        wanted = self._expectation.wanted(output.name for output in request.outputs)
        names = tuple([output.name for output in request.outputs])  # no more than there are: that was seen
        for output in request.outputs:
            _refuse(output.parameters, f"output {output.name!r}")
        return Inputs(arrays, self._expectation.complete(arrays), wanted, names, tuple(sizes))

    def encode(self, asked: Asked, wanted: Sequence[str], version: int, outputs: Mapping[str, np.ndarray]) -> bytes:
        """A ModelInferResponse, with the outputs that are wanted, in this order; () for all, in the model's."""
        names = wanted or tuple(self._datatypes)
        arrays = [(name, self._datatypes[name], outputs[name]) for name in names]
        for name, datatype, array in arrays:
            assert array.dtype == NUMPY[datatype], f"output {name!r}: expected {datatype}, got {array.dtype}"
        parts: list[bytes | memoryview] = []
        if asked.raw or any(datatype not in FIELDS for _, datatype, _ in arrays):
            shapes = version, tuple([(name, array.shape) for name, _, array in arrays])
            head = self._heads.get(shapes)
            if head is None:
                if len(self._heads) >= MAX_HEADS:  # or one more, when two threads have one to keep
                    self._heads.clear()
                head = self._heads[shapes] = self._head(version, arrays).SerializeToString()
            parts.append(head)
            for _, datatype, array in arrays:
                part = to_binary(datatype, array)
                parts += (field_head(RAW_OUTPUT, len(part)), part)
        else:
            answer = self._head(version, arrays)
            for tensor, (_, datatype, array) in zip(answer.outputs, arrays, strict=True):
                getattr(tensor.contents, FIELDS[datatype]).extend(array.ravel().tolist())
            parts.append(answer.SerializeToString())
        if asked.id:
            identifier = asked.id.encode()
            parts += (field_head(ID, len(identifier)), identifier)
        return b"".join(parts)

    def _head(self, version: int, arrays: Sequence[tuple[str, str, np.ndarray]]) -> pb.ModelInferResponse:
        """All of an answer but its elements and its id."""
        answer = pb.ModelInferResponse(model_name=self._model, model_version=str(version))
        for name, datatype, array in arrays:
            answer.outputs.add(name=name, datatype=datatype, shape=array.shape)
        return answer


def parameter_value(parameter: pb.InferParameter | pb.ModelRepositoryParameter) -> Any:
    """What a parameter holds; None when it holds nothing."""
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)


@lru_cache(1024)
def field_head(key: int, size_bytes: int) -> bytes:
    """What stands before a field's content: its key, of one byte, and the length, seven bits in each byte."""
    found = bytearray((key,))
    while size_bytes > 127:
        found.append(size_bytes & 127 | 128)
        size_bytes >>= 7
    found.append(size_bytes)
    return bytes(found)


def _from_typed(tensor: Input, shape: list[int]) -> np.ndarray:
    field = FIELDS.get(tensor.datatype)
    if field is None:
        raise InferenceError(422, f"input {tensor.name!r}: expected {tensor.datatype} in raw_input_contents")
    elements = getattr(tensor.contents, field)
    size = 1
    for each in shape:
        size *= each
    if len(elements) != size:
        problem = f"input {tensor.name!r}: expected {size} values in {field} for {shown(tensor.datatype, shape)}"
        raise InferenceError(422, f"{problem}, got {len(elements)}")
    if tensor.datatype == "BYTES":
        array = np.empty(size, object)
        array[:] = list(elements)
        return array.reshape(shape)
    try:  # of a list: NumPy looks at each value, where it would cut those of a buffer
        return np.array(list(elements), NUMPY[tensor.datatype]).reshape(shape)
    except OverflowError as error:
        raise InferenceError(422, f"input {tensor.name!r}: expected values of {tensor.datatype}: {error}") from None


def _refuse(parameters: Mapping[str, pb.InferParameter], where: str) -> None:
    for name in REFUSED_PARAMETERS:
        if name in parameters:
            raise InferenceError(400, f"{where}: the parameter {name!r} is of an extension that is not served")
