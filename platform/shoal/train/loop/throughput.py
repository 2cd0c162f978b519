"""Measure the cost of steps: seconds, samples, the shares lost to waiting. Called by the Trainer at each report.

Reads existing clocks; adds two numbers in each step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ThroughputMeter:
    """Rates since the last report, and the seconds of all training steps.

    peak_flops:       per second, of all devices together
    communicated_s:   returns the seconds spent waiting for other ranks so far; NaN if unknown
    flops_per_sample: forward and backward; NaN until known
    """

    def __init__(self, peak_flops: float, communicated_s: Callable[[], float]) -> None:
        self._communicated_s = communicated_s
        self.flops_per_sample, self._peak_flops = math.nan, peak_flops
        self._training_before_s = 0.0
        self._began_s = self._reported_s = time.perf_counter()
        self._steps = self._samples = 0
        self._paused_s = self._paused_before_s = 0.0
        self._waited_s = self._communicated_before_s = self._communicated_paused_s = 0.0

    def begin(self, training_s: float) -> None:
        """Start measuring; earlier attempts of the run have spent `training_s` on their steps."""
        self._training_before_s = training_s
        self._began_s = self._reported_s = time.perf_counter()

    @property
    def training_s(self) -> float:
        """Seconds of training steps, over all attempts, without evaluations and checkpoints."""
        return self._training_before_s + time.perf_counter() - self._began_s - self._paused_s

    def count_steps(self, num_steps: int, num_samples: int) -> None:
        """Count steps over this number of samples, of all ranks. Replicas without waiting make several at once."""
        self._steps += num_steps
        self._samples += num_samples

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the body (an evaluation, a checkpoint) from the step times."""
        began_s, communicated_s = time.perf_counter(), self._communicated_s()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - began_s
            self._communicated_paused_s += self._communicated_s() - communicated_s

    def compute_rates(self, waited_s: float) -> dict[str, float]:
        """Rates since the last report, given the sum of seconds spent waiting for data.

        Unknown values (NaN) are omitted.
        """
        now_s, steps = time.perf_counter(), self._steps
        elapsed_s = max(now_s - self._reported_s - (self._paused_s - self._paused_before_s), 1e-9)
        per_s = self._samples / elapsed_s
        communicated_s = self._communicated_s() - self._communicated_paused_s
        rates = {
            "samples/per_s": per_s,
            "step/seconds": elapsed_s / max(steps, 1),
            "wait/data": _share(waited_s - self._waited_s, elapsed_s),
            "wait/communication": _share(communicated_s - self._communicated_before_s, elapsed_s),
            "flops/utilisation": per_s * self.flops_per_sample / self._peak_flops,
        }
        self._reported_s, self._steps, self._samples = now_s, 0, 0
        self._paused_before_s, self._waited_s, self._communicated_before_s = self._paused_s, waited_s, communicated_s
        return {name: value for name, value in rates.items() if math.isfinite(value)} if steps else {}


def _share(waited_s: float, elapsed_s: float) -> float:
    """At most 1; keeps NaN, of which `min` would make 1."""
    return min(1.0, waited_s / elapsed_s) if math.isfinite(waited_s) else math.nan
