"""The curves of the runs that are looked at, in memory: read once, extended as values come, thinned to a picture.

A curve keeps of each of its parts the lowest and the highest value, so that no peak is lost.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from shoal.extend.runs import MetricValue, Run, read_values, sample_values, summarize_metrics

MAX_RUNS = 16
SAMPLE_STEPS = 1000

Columns = dict[str, list[float | None] | list[int]]


@dataclass
class Curve:
    """Of one metric. steps, times [N]: with the values [N], ordered by step; times in Unix seconds."""

    steps: np.ndarray
    times: np.ndarray
    values: np.ndarray

    def thin(self, num_points: int, first: float, last: float) -> Columns:
        """Columns of at most about `num_points` points between two steps."""
        begin, end = (int(self.steps.searchsorted(*each)) for each in ((first, "left"), (last, "right")))
        begin, end = max(0, begin - 1), min(len(self.steps), end + 1)  # one beyond each side: the line leaves there
        chosen = np.arange(begin, end)
        if len(chosen) > num_points:
            chosen = begin + choose_extremes(self.values[begin:end], num_points)
        return {
            "steps": self.steps[chosen].tolist(),
            "times": self.times[chosen].tolist(),
            "values": self.values[chosen].tolist(),
        }


def choose_extremes(values: np.ndarray, num_points: int) -> np.ndarray:
    """The places of the lowest and the highest value of each of `num_points // 2` parts, and of both ends."""
    num_parts = max(1, num_points // 2)
    width = -(-len(values) // num_parts)
    padded = np.pad(values, (0, -len(values) % width), mode="edge").reshape(-1, width)
    starts = np.arange(len(padded)) * width
    lowest = np.where(np.isnan(padded), np.inf, padded).argmin(1) + starts
    highest = np.where(np.isnan(padded), -np.inf, padded).argmax(1) + starts
    places = np.unique(np.concatenate([[0], lowest, highest, [len(values) - 1]]))
    return places[places < len(values)]


def split_by_name(values: Iterable[MetricValue]) -> dict[str, Curve]:
    """The curve of each metric among values that are ordered by step."""
    columns: dict[str, tuple[list[int], list[float], list[float]]] = {}
    for step, name, time, value in values:
        steps, times, numbers = columns.setdefault(name, ([], [], []))
        steps.append(step)
        times.append(time)
        numbers.append(value)
    return {name: Curve(np.array(each[0]), np.array(each[1]), np.array(each[2])) for name, each in columns.items()}


@dataclass
class RunCurves:
    """Of one run. incarnation: a run that is resumed replaces values, and is read again"""

    incarnation: int
    curves: dict[str, Curve]
    last_step: int
    lock: threading.Lock = field(default_factory=threading.Lock)


class CurveCache:
    """The curves of the runs that were looked at last. Any thread may use it."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, RunCurves] = OrderedDict()
        self._lock = threading.Lock()

    def sample(self, run: Run) -> dict[str, Curve] | None:
        """Curves of a sample of the steps, at once; None when all values are in memory."""
        with self._lock:
            if run.id in self._runs:
                return None
        return split_by_name(sample_values(run, SAMPLE_STEPS))

    def read(self, run: Run) -> dict[str, Curve]:
        """All curves as they are now."""
        with self._lock:
            known = self._runs.get(run.id)
            if known is None or known.incarnation != run.incarnation:
                known = self._runs[run.id] = RunCurves(run.incarnation, {}, -1)
            self._runs.move_to_end(run.id)
            while len(self._runs) > MAX_RUNS:
                self._runs.popitem(last=False)
        with known.lock:
            self._extend(known, run)
            return dict(known.curves)

    def _extend(self, known: RunCurves, run: Run) -> None:
        """Read the values of later steps; all again where one came for an earlier step."""
        new = split_by_name(read_values(run, known.last_step))
        seen = {
            name: max(curve.times[-1], new[name].times[-1] if name in new else 0)
            for name, curve in known.curves.items()
        }
        late = [
            each.name
            for each in summarize_metrics(run)
            if each.step <= known.last_step and each.time > seen.get(each.name, 0.0)
        ]
        if late:
            known.curves, new = {}, split_by_name(read_values(run))
        for name, curve in new.items():
            before = known.curves.get(name)
            known.curves[name] = (
                curve
                if before is None
                else Curve(
                    np.concatenate([before.steps, curve.steps]),
                    np.concatenate([before.times, curve.times]),
                    np.concatenate([before.values, curve.values]),
                )
            )
        known.last_step = max([known.last_step, *(int(curve.steps[-1]) for curve in new.values())])
