"""Checks that a model's outputs are those that its metadata announces. Called after each forward. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.errors import InferenceError
from shoal.open_inference.datatypes import NUMPY_DTYPES
from shoal.open_inference.messages import TensorMetadata
from shoal.serve.messages.infer_call import Arrays, Outputs

_BF16_EXPONENT = 0x7F80  # all ones: infinite or NaN


class NotFiniteOutput(InferenceError):
    """An output contains NaN or an infinity."""

    def __init__(self, output: str, num_bad: int, size: int) -> None:
        self.output = output
        self.num_bad = num_bad
        self.size = size
        super().__init__(500, f"output {output!r} is not finite: {num_bad} of its {size} values are NaN or infinite")


class OutputCheck:
    """Checks the outputs of each batch: all of the signature, of its datatypes and shapes, a row for each of input.

    In the model's own shapes. A mismatch raises an InferenceError (500) with the output's name, the expected and the
    actual type: an endpoint never answers anything that its metadata does not announce.

    batch_dims: the dimension of the rows in each output; None for an output without it
    finite:     whether a NaN or infinite output is an error
    """

    def __init__(
        self, outputs: Sequence[TensorMetadata], batch_dims: Mapping[str, int | None], *, finite: bool
    ) -> None:
        tests: dict[str, Any] = {
            **dict.fromkeys(("FP16", "FP32", "FP64"), np.isfinite),
            "BF16": lambda bits: (bits & _BF16_EXPONENT) != _BF16_EXPONENT,
        }
        self._specs = [
            (spec, NUMPY_DTYPES[spec.datatype], batch_dims[spec.name], tests.get(spec.datatype) if finite else None)
            for spec in outputs
        ]

    def validate(self, given: Arrays, num_rows: int) -> Outputs:
        """Return the signature's outputs in its order. Raises InferenceError (500)."""
        outputs = {}
        for spec, dtype, dimension, is_finite in self._specs:
            name, expected = spec.name, _insert_rows(spec.shape, dimension, num_rows)
            array = given.get(name)
            if array is None:
                names = ", ".join(map(repr, given)) or "none"
                raise InferenceError(500, f"output {name!r} is missing: the model gave {names}")
            if array.shape != expected or array.dtype != dtype or dtype.kind == "O":
                array = _validate_output(array, spec, expected)
            if is_finite is not None and (num_finite := np.count_nonzero(is_finite(array))) != array.size:
                raise NotFiniteOutput(name, array.size - int(num_finite), array.size)
            outputs[name] = array
        return outputs

    def make_empty_outputs(self) -> Outputs:
        """Build the answer to a request without rows."""
        return {
            spec.name: np.empty([max(size, 0) for size in _insert_rows(spec.shape, dimension, 0)], dtype)
            for spec, dtype, dimension, _ in self._specs
        }


def _insert_rows(shape: Sequence[int], dimension: int | None, num_rows: int) -> tuple[int, ...]:
    """The shape of an output for so many rows."""
    return tuple(shape) if dimension is None else (*shape[:dimension], num_rows, *shape[dimension + 1 :])


def _validate_output(array: np.ndarray, spec: TensorMetadata, expected: Sequence[int]) -> np.ndarray:
    """Check one array, whose open dimensions may have any size; strings become bytes. Raises InferenceError (500)."""
    if spec.datatype == "BYTES":
        array = _as_bytes(array, spec.name)
    fits = len(array.shape) == len(expected) and array.dtype == NUMPY_DTYPES[spec.datatype]
    if not fits or any(want not in (-1, have) for have, want in zip(array.shape, expected, strict=True)):
        names = [
            datatype
            for datatype, dtype in NUMPY_DTYPES.items()
            if array.dtype == dtype and (datatype != "BF16" or spec.datatype == "BF16")  # which looks like UINT16
        ]
        got = f"{names[0] if names else array.dtype} {[*array.shape]}"
        raise InferenceError(500, f"output {spec.name!r}: expected {spec.datatype} {[*expected]}, got {got}")
    return array


def _as_bytes(array: np.ndarray, name: str) -> np.ndarray:
    """Strings as an array of bytes objects."""
    if array.dtype.kind == "U":
        array = np.char.encode(array, "utf-8")
    if array.dtype.kind == "S":
        return array.astype(object)
    if array.dtype.kind != "O":
        return array
    encoded = [each.encode() if isinstance(each, str) else each for each in array.ravel().tolist()]
    wrong = next((each for each in encoded if not isinstance(each, bytes)), None)
    if wrong is not None:
        raise InferenceError(500, f"output {name!r}: expected BYTES, got an element of type {type(wrong).__name__}")
    flat = np.empty(len(encoded), object)
    flat[:] = encoded
    return flat.reshape(array.shape)
