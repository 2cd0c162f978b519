"""Decides which requests of several lengths share a forward, by the cost of padding and of each further forward.

Owns the times of forwards over padded inputs, by number of elements. Called by a loaded model with a batch of different
shapes; never decides which requests form a batch.

A batch is sorted by row size and cut where the sum of l(padded elements) over its parts is least, found by dynamic
programming. l is learned from every forward. On a GPU, where a larger forward takes hardly longer, a batch stays in one
piece; on a CPU, where time grows with the elements, short requests do not pay for long ones. A size below all observed
ones is assumed to cost the same per element, but at least `UNSEEN_COST_RATIO` of the smallest: so smaller parts are
tried, a few at a time, and measured.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.batching.latency_model import OBSERVED_EVERY_S, LatencyModel
from shoal.registry.manifest import Signature
from shoal.serve.model.formats import Arrays
from shoal.serve.model.padding import fixed_elements, variable_dimensions

MAX_SPLIT_POINTS = 16  # the most split points considered for a batch
MAX_COST_RATIO = 0.95  # of the uncut time: predictions are no more precise
MIN_GAIN_S = 0.0005  # a smaller gain is not worth the search, which takes up to half of it
UNSEEN_COST_RATIO = 0.25  # of the smallest observed time: the least assumed for an untried size

Sizes = tuple[int, ...]  # sizes of the variable dimensions, input by input


class _Input(NamedTuple):
    """An input of the signature: a row has `fixed` elements times the sizes of its variable `dimensions`."""

    name: str
    fixed: int
    dimensions: tuple[int, ...]


class PaddingCostModel:
    """Cuts the batches of one model, for any number of threads. The signature has a variable dimension."""

    def __init__(self, signature: Signature, clock: Callable[[], float] = time.monotonic) -> None:
        self._inputs = [
            _Input(spec.name, fixed_elements(spec), tuple(variable_dimensions(spec))) for spec in signature.inputs
        ]
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
