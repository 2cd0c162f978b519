"""The schema of one model's requests: names, datatypes, shapes and rows, checked before any value is read.

Called for every tensor of a request by the REST codec and by the gRPC service, with the request's *declarations*,
before any value is read or memory allocated. Knows no encoding. Every error is an InferenceError (422, 413 for too many
elements) with the tensor's name, the expected and the actual declaration.

The batch is the first dimension, another one, or missing. It has at least one row, as in Triton; another variable
dimension may be 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InferenceError
from shoal.open_inference.messages import TensorMetadata

# Parameters of unsupported parts of the protocol: ignoring them would change the meaning of the request.
REFUSED_PARAMETERS = ("shared_memory_region", "classification")
MAX_ELEMENTS = 1 << 24  # of a tensor of variable size, to which others in its batch are padded
MAX_SHOWN = 8  # the most dimensions of a client's shape in an error


class RequestSchema:
    """Checks declarations against a model's inputs and outputs.

    max_rows:  its largest batch; 0 for a model without a batch
    batch_dim: the dimension of the batch in tensors where it is not 0; None for one without it
    """

    def __init__(
        self,
        inputs: Sequence[TensorMetadata],
        outputs: Sequence[TensorMetadata],
        max_rows: int,
        batch_dim: Mapping[str, int | None] | None = None,
    ) -> None:
        self.inputs = {spec.name: spec for spec in inputs}
        self.outputs = {spec.name: spec for spec in outputs}
        self._max_rows = max_rows
        dimensions = batch_dim or {}
        self.batch_dim = {spec.name: dimensions.get(spec.name, 0) if max_rows else None for spec in inputs}
        # The shape without the batch where it is fixed, for one comparison.
        rests = {spec.name: _remove_dimension(spec.shape, self.batch_dim[spec.name]) for spec in inputs}
        self._rest = {name: None if -1 in rest else rest for name, rest in rests.items()}

    def check_tensor(self, name: str, datatype: str, shape: Sequence[int], accepted: Mapping[str, Any]) -> None:
        """Check one tensor of a request, after those `accepted`. Raises InferenceError (413, 422)."""
        spec = self.inputs.get(name)
        if spec is None:
            expected = ", ".join(map(repr, self.inputs))
            raise InferenceError(422, f"input {name[:200]!r} is unknown: expected {expected}")
        if name in accepted:
            raise InferenceError(422, f"input {name!r} was given twice")
        if not is_exact_in(datatype, spec.datatype) or not self._has_shape(spec, list(shape)):
            raise InferenceError(
                422, f"input {name!r}: expected {format_tensor_spec(spec)}, got {format_tensor_type(datatype, shape)}"
            )
        dimension = self.batch_dim[name]
        if dimension is not None and not 0 < shape[dimension] <= self._max_rows:
            expected = f"expected 1 to {self._max_rows} rows"
            raise InferenceError(422, f"input {name!r}: {expected}, got {format_tensor_type(datatype, shape)}")
        # A size of 0 does not hide other sizes that exceed NumPy's range.
        if self._rest[name] is None and math.prod([max(size, 1) for size in shape]) > MAX_ELEMENTS:
            limit = f"at most {MAX_ELEMENTS} elements are taken"
            raise InferenceError(413, f"input {name!r}: {limit}, got {format_tensor_type(datatype, shape)}")

    def to_input_dtype(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """The array of an accepted tensor in the datatype of its input."""
        return array.astype(np.float64, copy=False) if self.inputs[name].datatype == "FP64" else array

    def check_complete(self, arrays: Mapping[str, Any]) -> int:
        """Check a full request; returns its number of rows, 1 without a batch. Raises InferenceError (422)."""
        if len(arrays) != len(self.inputs):
            spec = next(spec for name, spec in self.inputs.items() if name not in arrays)
            raise InferenceError(422, f"input {spec.name!r} is missing: expected {format_tensor_spec(spec)}")
        num_rows, first = 1, ""
        for name, array in arrays.items():
            dimension = self.batch_dim[name]
            if dimension is None:
                continue
            rows = array.shape[dimension]
            if first and rows != num_rows:
                raise InferenceError(422, f"input {name!r}: expected {num_rows} rows, as of {first!r}, got {rows}")
            num_rows, first = rows, first or name
        return num_rows

    def check_outputs(self, names: Iterable[str]) -> frozenset[str] | None:
        """Check the requested outputs; None for all. Raises InferenceError (422) at the first unknown or repeated one,
        so it reads at most one name more than the model has outputs."""
        requested: set[str] = set()
        for name in names:
            if name not in self.outputs:
                expected = ", ".join(map(repr, self.outputs))
                raise InferenceError(422, f"output {name[:200]!r} is unknown: expected {expected}")
            if name in requested:
                raise InferenceError(422, f"output {name!r} was asked for twice")
            requested.add(name)
        return frozenset(requested) or None

    def _has_shape(self, spec: TensorMetadata, shape: list[int]) -> bool:
        if len(shape) != len(spec.shape):
            return False
        dimension, rest = self.batch_dim[spec.name], self._rest[spec.name]
        if dimension is not None and spec.shape[dimension] not in (-1, shape[dimension]):
            return False
        if rest is not None:
            return _remove_dimension(shape, dimension) == rest
        return all(have >= 0 and want in (-1, have) for have, want in zip(shape, spec.shape, strict=True))


def _remove_dimension(shape: list[int], dimension: int | None) -> list[int]:
    return shape if dimension is None else shape[:dimension] + shape[dimension + 1 :]


def format_tensor_spec(spec: TensorMetadata) -> str:
    """`FP32 [-1, 64]`."""
    return f"{spec.datatype} {spec.shape}"


def is_exact_in(datatype: str, wanted: str) -> bool:
    """Whether an input of the datatype `wanted` takes it: its own, or FP32 for FP64, which has each of its values."""
    return datatype == wanted or (datatype == "FP32" and wanted == "FP64")


def format_tensor_type(datatype: str, shape: Sequence[int]) -> str:
    """Format a client's declaration, shortened for an error."""
    rest = ", ..." if len(shape) > MAX_SHOWN else ""
    return f"{datatype[:20]} [{', '.join(map(str, shape[:MAX_SHOWN]))}{rest}]"
