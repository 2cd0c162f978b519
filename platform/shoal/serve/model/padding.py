"""Joins requests of several lengths into a batch and splits the answers.

Called by the predictor. Pure functions of arrays and of a signature, in which -1 is a dimension of variable size.

bucket  only requests of equal shapes share a batch
pad     shorter requests are filled at the end, and an output's variable dimension is cut to its request's length. It
        follows the variable input dimension at the same place, or else the only one. An output dimension of another
        size than that input's does not depend on it and stays unchanged. With several such inputs, requests in which
        they differ share a batch only with equal shapes. Requests whose padded row has at most
        `MAX_SHARED_ROW_ELEMENTS` share one bucket. Larger ones share a bucket with those of about their size, so that
        padding at most doubles each dimension: a long and a wide one would fill the memory.

`PaddingCost` decides which requests of several lengths share a forward, by the cost of padding and of each further
forward. A batch is sorted by row size and cut where the sum of l(padded elements) over its parts is least, found by
dynamic programming. l is learned from every forward. On a GPU, where a larger forward takes hardly longer, a batch
stays in one piece; on a CPU, where time grows with the elements, short requests do not pay for long ones. A size below
all observed ones is assumed to cost the same per element, but at least `UNSEEN_COST_RATIO` of the smallest: so smaller
parts are tried, a few at a time, and measured.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from shoal.batching.latency_model import OBSERVED_EVERY_S, LatencyModel
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
            for spec in signature.inputs:
                variable = self._variable[spec.name]
                for dimension in variable:
                    most = int((MAX_SHARED_ROW_ELEMENTS / max(fixed_elements(spec), 1)) ** (1 / len(variable)))
                    self._size_limits.append((spec.name, dimension, most))

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


MAX_SPLIT_POINTS = 16  # the most split points considered for a batch
MAX_COST_RATIO = 0.95  # of the uncut time: predictions are no more precise
MIN_GAIN_S = 0.0005  # a smaller gain is not worth the search, which takes up to half of it
UNSEEN_COST_RATIO = 0.25  # of the smallest observed time: the least assumed for an untried size

Sizes = tuple[int, ...]  # sizes of the variable dimensions, input by input


class PaddingCostModel:
    """Cuts the batches of one model, for any number of threads. The signature has a variable dimension."""

    def __init__(self, signature: Signature, clock: Callable[[], float] = time.monotonic) -> None:
        # A row of an input has its fixed elements times the sizes of its variable dimensions.
        self._inputs = [(spec.name, fixed_elements(spec), variable_dimensions(spec)) for spec in signature.inputs]
        self._first = signature.inputs[0].name
        self._clock, self._latency = clock, LatencyModel()
        self._least = (0, 0.0)  # the fewest elements observed, and their time
        self._lock = threading.Lock()
        self._next_observation_s = -math.inf

    def split_batch(self, requests: Sequence[Arrays]) -> list[list[int]]:
        """Split a batch into forwards, each a list of indices into `requests`."""
        whole = list(range(len(requests)))
        sizes = [self._sizes(request) for request in requests]
        if len(set(sizes)) == 1:
            return [whole]
        rows = [len(request[self._first]) for request in requests]
        padded_s = self._seconds(self._elements(sum(rows), _largest(sizes)))
        own = [self._elements(count, each) for count, each in zip(rows, sizes, strict=True)]
        # Several forwards take at least as long as one over all their elements without padding.
        if padded_s - self._seconds(sum(own)) < max((1 - MAX_COST_RATIO) * padded_s, MIN_GAIN_S):
            return [whole]
        step = -(-len(requests) // MAX_SPLIT_POINTS)
        order = sorted(whole, key=lambda index: own[index] / max(rows[index], 1))
        groups = [order[start : start + step] for start in range(0, len(order), step)]
        bounds, seconds = self._find_best_split(
            [(sum([rows[p] for p in g]), _largest([sizes[p] for p in g])) for g in groups]
        )
        if seconds > MAX_COST_RATIO * padded_s:
            return [whole]
        return [[index for group in groups[begin:end] for index in group] for begin, end in bounds]

    def observe(self, requests: Sequence[Arrays], seconds: float) -> None:
        """Record the `seconds` of a padded forward over these requests."""
        now_s = self._clock()
        if now_s < self._next_observation_s:
            return
        sizes = _largest([self._sizes(request) for request in requests])
        elements = self._elements(sum([len(request[self._first]) for request in requests]), sizes)
        if elements:
            with self._lock:
                self._next_observation_s = now_s + OBSERVED_EVERY_S
                self._latency.observe(elements, seconds, now_s)
                self._least = self._latency.list_points()[0]

    def _find_best_split(self, groups: Sequence[tuple[int, Sizes]]) -> tuple[list[tuple[int, int]], float]:
        """Find the bounds of the parts with the least total time, and that time. Groups: (rows, sizes) each."""
        least_s, begins = [0.0], [0]
        for end in range(1, len(groups) + 1):
            rows, sizes = 0, groups[end - 1][1]
            best_s, best = math.inf, 0
            for begin in range(end - 1, -1, -1):
                rows += groups[begin][0]
                sizes = _largest([sizes, groups[begin][1]])
                seconds = least_s[begin] + self._seconds(self._elements(rows, sizes))
                if seconds <= best_s:  # on a tie, the one with fewer parts
                    best_s, best = seconds, begin
            least_s.append(best_s)
            begins.append(best)
        bounds, end = [], len(groups)
        while end:
            bounds.append((begins[end], end))
            end = begins[end]
        return bounds[::-1], least_s[-1]

    def _seconds(self, elements: int) -> float:
        least, seconds = self._least
        return (
            seconds * max(elements / least, UNSEEN_COST_RATIO) if elements < least else self._latency.seconds(elements)
        )

    def _sizes(self, request: Arrays) -> Sizes:
        return tuple([request[name].shape[place] for name, _, dimensions in self._inputs for place in dimensions])

    def _elements(self, rows: int, sizes: Sizes) -> int:
        total, start = 0, 0
        for _, fixed, dimensions in self._inputs:
            end = start + len(dimensions)
            total += fixed * math.prod(sizes[start:end])
            start = end
        return rows * total


def _largest(sizes: Sequence[Sizes]) -> Sizes:
    return tuple(map(max, zip(*sizes, strict=True)))
