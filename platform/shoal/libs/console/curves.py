"""The curves of the runs that are looked at, in memory: read once, extended as values come."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from shoal.extend.runs import MetricHistory, Run, read_curves, sample_curves, summarize_metrics

MAX_RUNS = 32
SAMPLE_STEPS = 500


@dataclass
class RunCurves:
    """Of one run.

    read_times: when the newest value of each metric was logged that had been read; Unix seconds
    """

    curves: dict[str, MetricHistory] = field(default_factory=dict)
    last_step: int = -1
    read_times: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def extend(self, run: Run) -> None:
        """Read what is new: the values of later steps, or, where one came for an earlier step, by their time."""
        summaries = summarize_metrics(run)  # before the values, which are then at least as new
        read_until = [
            self.read_times.get(each.name, 0.0)
            for each in summaries
            if each.step <= self.last_step and each.time > self.read_times.get(each.name, 0.0)
        ]
        if read_until:
            new = read_curves(run, after_time=min(read_until))
        else:
            new = read_curves(run, after_step=self.last_step)
        self.read_times = {each.name: each.time for each in summaries}
        for name, curve in new.items():
            self.curves[name] = _join(self.curves[name], curve) if name in self.curves else curve
        self.last_step = max([self.last_step, *(int(curve.steps[-1]) for curve in new.values())])


def _join(before: MetricHistory, new: MetricHistory) -> MetricHistory:
    """Both, ordered by step; of one step the new value."""
    columns = [np.concatenate([getattr(each, name) for each in (before, new)]) for name in ("steps", "times", "values")]
    if new.steps[0] <= before.steps[-1]:
        order = columns[0].argsort(kind="stable")
        is_last = np.append(np.diff(columns[0][order]) > 0, True)
        columns = [column[order][is_last] for column in columns]
    return MetricHistory(*columns)


class CurveCache:
    """The curves of the runs that were looked at last. Any thread may use it."""

    def __init__(self) -> None:
        # A run that is resumed replaces values, and is read again.
        self._find = lru_cache(MAX_RUNS)(lambda run_id, incarnation: RunCurves())

    def sample(self, run: Run) -> dict[str, MetricHistory] | None:
        """Curves of a sample of the steps, at once; None when all values are in memory."""
        is_read = self._find(run.id, run.incarnation).last_step >= 0  # otherwise another page's request is reading it
        return None if is_read else sample_curves(run, SAMPLE_STEPS)

    def read(self, run: Run) -> dict[str, MetricHistory]:
        """All curves as they are now."""
        known = self._find(run.id, run.incarnation)
        with known.lock:
            known.extend(run)
            return dict(known.curves)
