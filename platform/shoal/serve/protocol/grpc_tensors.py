"""Tensors in protobuf messages: a request's into arrays that fit the model, outputs into an answer.

Called by `grpc_service`, one codec for each model. Elements come raw, one blob for each input, or typed, in the field
that the datatype has; the answer is raw when the request was, and when an output has no typed field. Nothing is
allocated for what a request declares before its bytes are seen to be there. Complaints are InferenceErrors: 400 for
what is not a request, 422 for a tensor that does not fit, naming it, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shoal.errors import InferenceError
from shoal.open_inference import inference_pb2 as pb
from shoal.open_inference.binary_tensors import from_binary, to_binary
from shoal.open_inference.datatypes import NUMPY
from shoal.open_inference.expectation import Expectation, shown
from shoal.open_inference.infer_codec import REFUSED_PARAMETERS
from shoal.open_inference.messages import TensorMetadata

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

Input = pb.ModelInferRequest.InferInputTensor


class GrpcCodec:
    """Reads requests for, and writes answers of, one model."""

    def __init__(self, inputs: Sequence[TensorMetadata], outputs: Sequence[TensorMetadata], max_rows: int) -> None:
        self._expectation = Expectation(inputs, outputs, max_rows)
        self._datatypes = {spec.name: spec.datatype for spec in outputs}

    def decode(self, request: pb.ModelInferRequest) -> tuple[dict[str, np.ndarray], int, frozenset[str] | None]:
        """The inputs by name, the rows of each, and the outputs that are wanted (None for all).

        Arrays that came raw are views of the request's bytes. Raises InferenceError (400, 422).
        """
        raw = request.raw_input_contents
        if raw and len(raw) != len(request.inputs):
            problem = f"raw_input_contents has {len(raw)} entries for {len(request.inputs)} inputs"
            raise InferenceError(400, f"{problem}: expected one for each, or none and typed contents")
        arrays: dict[str, np.ndarray] = {}
        for index, tensor in enumerate(request.inputs):
            name, shape = tensor.name, list(tensor.shape)
            self._expectation.declare(name, tensor.datatype, shape, arrays)
            _refuse(tensor.parameters, f"input {name!r}")
            if raw:
                if tensor.HasField("contents"):
                    raise InferenceError(400, f"input {name!r}: expected contents or raw_input_contents, got both")
                arrays[name] = from_binary(name, tensor.datatype, shape, raw[index])
            else:
                arrays[name] = _from_typed(tensor, shape)
        wanted = self._expectation.wanted(output.name for output in request.outputs)
        for output in request.outputs:
            _refuse(output.parameters, f"output {output.name!r}")
        return arrays, self._expectation.complete(arrays), wanted

    def encode(
        self, request: pb.ModelInferRequest, version: int, outputs: Mapping[str, np.ndarray]
    ) -> pb.ModelInferResponse:
        """The answer, its outputs in the order in which they were asked for, else in the model's."""
        names = [output.name for output in request.outputs] or list(self._datatypes)
        raw = bool(request.raw_input_contents) or any(self._datatypes[name] not in FIELDS for name in names)
        answer = pb.ModelInferResponse(model_name=request.model_name, model_version=str(version), id=request.id)
        for name in names:
            datatype, array = self._datatypes[name], outputs[name]
            assert array.dtype == NUMPY[datatype], f"output {name!r}: expected {datatype}, got {array.dtype}"
            tensor = answer.outputs.add(name=name, datatype=datatype, shape=array.shape)
            if raw:
                answer.raw_output_contents.append(bytes(to_binary(datatype, array)))
            else:
                getattr(tensor.contents, FIELDS[datatype]).extend(array.ravel().tolist())
        return answer


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
