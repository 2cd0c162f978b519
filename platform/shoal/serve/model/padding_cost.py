"""Which requests of several lengths share a forward: padding costs time, and so does each further forward.

Owns what forwards over padded inputs have taken, by their number of elements. Called by a loaded model with a batch
whose shapes differ; never decides which requests are a batch.

A batch is sorted by the size of a row and cut where the sum over its parts of l(elements, padded) is least, found by
dynamic programming. l is learned from every forward: on a GPU, where a larger forward takes hardly longer, a batch
stays whole; on a processor, where time goes with the elements, short requests do not pay for long ones. What is smaller
than all that was seen is taken to cost as much by the element, but not less than `UNSEEN` of it: so smaller parts are
tried, a few at a time, and known from then on.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.registry.manifest import Signature
from shoal.serve.batching.latency_model import OBSERVED_EVERY_S, LatencyModel
from shoal.serve.model.formats import Arrays
from shoal.serve.model.padding import fixed_elements, variable_dimensions

MAX_SPLIT_POINTS = 16  # places at which a batch may be cut
MAX_COST_RATIO = 0.95  # of what the whole would take: what is predicted is not known better than that
MIN_GAIN_S = 0.0005  # less is not worth looking for the best cuts, which takes up to half of it
UNSEEN_COST_RATIO = 0.25  # of the least that was seen: what anything smaller takes at the least, until it was tried

Sizes = tuple[int, ...]  # of the variable dimensions, input by input


class _Input(NamedTuple):
    """Of the signature: a row has `fixed` elements times the sizes of its variable `dimensions`."""

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
        self._least = (0, 0.0)  # the fewest elements that were seen, and what they took
        self._lock = threading.Lock()
        self._next_observation_s = -math.inf

    def split_batch(self, requests: Sequence[Arrays]) -> list[list[int]]:
        """The places in `requests` of those that share a forward, for each forward."""
        whole = list(range(len(requests)))
        sizes = [self._sizes(request) for request in requests]
        if len(set(sizes)) == 1:
            return [whole]
        rows = [len(request[self._first]) for request in requests]
        padded_s = self._seconds(self._elements(sum(rows), _largest(sizes)))
        own = [self._elements(count, each) for count, each in zip(rows, sizes, strict=True)]
        # Several forwards take no less than one over all their elements, without padding, would.
        if padded_s - self._seconds(sum(own)) < max((1 - MAX_COST_RATIO) * padded_s, MIN_GAIN_S):
            return [whole]
        step = -(-len(requests) // MAX_SPLIT_POINTS)
        order = sorted(whole, key=lambda place: own[place] / max(rows[place], 1))
        groups = [order[start : start + step] for start in range(0, len(order), step)]
        bounds, seconds = self._find_best_split(
            [(sum([rows[p] for p in g]), _largest([sizes[p] for p in g])) for g in groups]
        )
        if seconds > MAX_COST_RATIO * padded_s:
            return [whole]
        return [[place for group in groups[begin:end] for place in group] for begin, end in bounds]

    def observe(self, requests: Sequence[Arrays], seconds: float) -> None:
        """A forward over these, padded, took `seconds`."""
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
        """The bounds of the parts that take the least together, and what they take. Groups: (rows, sizes) each."""
        least_s, begins = [0.0], [0]
        for end in range(1, len(groups) + 1):
            rows, sizes = 0, groups[end - 1][1]
            best_s, best = math.inf, 0
            for begin in range(end - 1, -1, -1):
                rows += groups[begin][0]
                sizes = _largest([sizes, groups[begin][1]])
                seconds = least_s[begin] + self._seconds(self._elements(rows, sizes))
                if seconds <= best_s:  # of equals the one with fewer parts
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
