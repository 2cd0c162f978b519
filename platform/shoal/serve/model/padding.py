"""Joins requests of several lengths into a batch and splits the answers.

Called by the predictor. Pure functions of arrays and of a signature, in which -1 is a dimension of variable size.

bucket  only requests of equal shapes share a batch
pad     shorter requests are filled at the end, and an output's variable dimension is cut to its request's length. It
        follows the variable input dimension at the same place, or else the only one. An output dimension of another
        size than that input's does not depend on it and stays unchanged. With several such inputs, requests in which
        they differ share a batch only with equal shapes. Requests whose padded row has at most
        `MAX_SHARED_ROW_ELEMENTS` share one bucket. Larger ones share a bucket with those of about their size, so that
        padding at most doubles each dimension: a long and a wide one would fill the memory.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from shoal.errors import ConfigError
from shoal.open_inference.datatypes import NUMPY_DTYPES, bf16_bits
from shoal.registry.manifest import Signature, TensorSignature
from shoal.serve.model.formats import Arrays

MAX_SHARED_ROW_ELEMENTS = 1 << 17  # elements of one input


@dataclass(frozen=True, slots=True)
class CollatedBatch:
    """Several requests as one batch. `bounds`: the start of each, and the end of the last."""

    inputs: dict[str, np.ndarray]
    bounds: list[int]


class RequestCollator:
    """Joins requests for one model and splits their answers.

    pad_value: fills shorter requests; None: only equal shapes occur. Raises ConfigError for a value outside an input's
               datatype.
    shared:    inputs that are equal for all requests of a batch
    """

    def __init__(self, signature: Signature, pad_value: float | None, shared: Sequence[str] = ()) -> None:
        self._shared = shared
        self.names = [spec.name for spec in signature.inputs]
        self._variable = {spec.name: variable_dimensions(spec) for spec in signature.inputs}
        self._ragged = [name for name, dimensions in self._variable.items() if dimensions]
        self._pad_elements: dict[str, Any] = {}
        self._size_limits: list[tuple[str, int, int]] = []  # input, its dimension, the largest size that all may share
        self._followed_dimensions: list[tuple[str, int, str, int]] = []  # output, its dimension, input, its dimension
        # A dimension that an output follows, and the inputs that may have it.
        self._ambiguous_dimensions: list[tuple[int, list[str]]] = []
        if pad_value is not None and self._ragged:
            self._pad_elements = {spec.name: _to_pad_element(spec, pad_value) for spec in signature.inputs}
            self._followed_dimensions = _match_output_dimensions(signature, self._variable)
            self._ambiguous_dimensions = _find_ambiguous_dimensions(signature, self._variable)
            self._size_limits = [
                (
                    spec.name,
                    dimension,
                    int((MAX_SHARED_ROW_ELEMENTS / max(fixed_elements(spec), 1)) ** (1 / len(variable))),
                )
                for spec in signature.inputs
                for variable in [variable_dimensions(spec)]
                for dimension in variable
            ]

    @property
    def can_pad(self) -> bool:
        """Whether requests of several lengths may share a batch."""
        return bool(self._pad_elements)

    def compute_bucket(self, inputs: Arrays) -> Hashable:
        """The key that requests must have in common to share a batch."""
        bucket = self._compute_shape_bucket(inputs)
        if not self._shared:
            return bucket
        contents: list[Hashable] = []
        for name in self._shared:
            array = inputs[name][:1]
            contents += [array.shape, tuple(array.ravel().tolist()) if array.dtype.hasobject else array.tobytes()]
        return bucket, *contents

    def _compute_shape_bucket(self, inputs: Arrays) -> Hashable:
        if not self._ragged:
            return None
        if not self._pad_elements:
            return tuple([inputs[name].shape[1:] for name in self._ragged])
        for dimension, names in self._ambiguous_dimensions:
            if len({inputs[name].shape[dimension] for name in names}) > 1:
                return tuple([inputs[name].shape[1:] for name in self._ragged])
        for name, dimension, most in self._size_limits:
            if inputs[name].shape[dimension] > most:
                return tuple([inputs[name].shape[dimension].bit_length() for name, dimension, _ in self._size_limits])
        return None

    def collate(self, requests: Sequence[Arrays]) -> CollatedBatch:
        """Join requests along the first dimension."""
        joined, first = {}, self.names[0]
        bounds = [0, *accumulate([len(request[first]) for request in requests])]
        for name in self.names:
            arrays = [request[name] for request in requests]
            if name in self._shared:  # one copy for all rows: it may be large
                joined[name] = np.broadcast_to(arrays[0][:1], (bounds[-1], *arrays[0].shape[1:]))
            elif self._pad_elements and len({array.shape[1:] for array in arrays}) > 1:
                joined[name] = _pad_and_concatenate(arrays, self._pad_elements[name])
            else:
                joined[name] = np.concatenate(arrays)
        return CollatedBatch(joined, bounds)

    def split(self, outputs: Arrays, batch: CollatedBatch, requests: Sequence[Arrays]) -> list[dict[str, np.ndarray]]:
        """Split the outputs by request."""
        answers = [{name: rows[start:end] for name, rows in outputs.items()} for start, end in pairwise(batch.bounds)]
        for output, dimension, name, follows in self._followed_dimensions:
            padded = batch.inputs[name].shape[follows]
            if outputs[output].shape[dimension] != padded:
                continue
            for answer, request in zip(answers, requests, strict=True):
                length = request[name].shape[follows]
                if length != padded:
                    answer[output] = answer[output][(*[slice(None)] * dimension, slice(length))]
        return answers


def variable_dimensions(spec: TensorSignature) -> list[int]:
    """The dimensions of variable size, except the rows."""
    return [index for index, size in enumerate(spec.shape) if index and size == -1]


def fixed_elements(spec: TensorSignature) -> int:
    """Elements of a row whose variable dimensions are all 1."""
    return math.prod([size for size in spec.shape[1:] if size != -1])


def _match_output_dimensions(signature: Signature, variable: dict[str, list[int]]) -> list[tuple[str, int, str, int]]:
    """Match each variable dimension of an output with the input and dimension that it follows."""
    candidates = [(name, dimension) for name, dimensions in variable.items() for dimension in dimensions]
    matches = []
    for spec in signature.outputs:
        for dimension in variable_dimensions(spec):
            same = [each for each in candidates if each[1] == dimension]
            if same or len(candidates) == 1:
                matches.append((spec.name, dimension, *(same or candidates)[0]))
    return matches


def _find_ambiguous_dimensions(signature: Signature, variable: dict[str, list[int]]) -> list[tuple[int, list[str]]]:
    """List the dimensions that outputs follow and several inputs have, with these inputs."""
    followed = {dimension for spec in signature.outputs for dimension in variable_dimensions(spec)}
    inputs = [
        (each, [name for name, dimensions in variable.items() if each in dimensions]) for each in sorted(followed)
    ]
    return [(dimension, names) for dimension, names in inputs if len(names) > 1]


def _pad_and_concatenate(arrays: Sequence[np.ndarray], value: Any) -> np.ndarray:
    sizes = [max(lengths) for lengths in zip(*[array.shape[1:] for array in arrays], strict=True)]
    padded = np.full((sum(map(len, arrays)), *sizes), value, arrays[0].dtype)
    start = 0
    for array in arrays:
        end = start + len(array)
        padded[(slice(start, end), *map(slice, array.shape[1:]))] = array
        start = end
    return padded


def _to_pad_element(spec: TensorSignature, value: float) -> Any:
    """The value as an element of the input."""
    if spec.datatype == "BYTES":
        return b""
    if spec.datatype == "BF16":
        return bf16_bits(np.array([value], np.float32))[0]
    dtype = NUMPY_DTYPES[spec.datatype]
    if dtype.kind in "iub":
        least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype.name).min, np.iinfo(dtype.name).max)
        if not least <= value <= most:  # NaN neither
            raise ConfigError("pad_value", value, f"input {spec.name!r} is {spec.datatype}, which cannot hold it")
    return np.array(value).astype(dtype)[()]
