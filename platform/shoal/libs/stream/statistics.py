"""What a stream run measures of itself between two reports: rate, lag, latency, errors. Called by `StreamLoop`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from shoal.libs.stream.messages import Message


class StreamStatistics:
    """Collects since the last `take`."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._began_s = time.monotonic()
        self._num_batches = 0
        self._learn_ms: list[float] = []
        self._commit_ms: list[float] = []
        self._lags_ms: list[float] = []
        self._totals: defaultdict[str, float] = defaultdict(float)

    def add_answers(self, messages: Sequence[Message]) -> None:
        """Messages whose forecasts have just been sent."""
        now_s = time.time()
        self._lags_ms += [1e3 * (now_s - message.time_s) for message in messages]

    def add(self, num_messages: int, seconds: float, has_learnt: bool, totals: Mapping[str, float]) -> None:
        """A batch that took so long to be answered, and learnt if `has_learnt`."""
        self._num_batches += num_messages > 0
        if has_learnt:
            self._learn_ms.append(1e3 * seconds)
        for name, value in totals.items():
            self._totals[name] += value

    def add_commit(self, commit_s: float) -> None:
        """A group that took `commit_s` from the snapshot to the acknowledgement."""
        self._commit_ms.append(1e3 * commit_s)

    def take(self) -> dict[str, float]:
        """The metrics since the last call, by name. Lags are from the publishers' clocks to the answer."""
        seconds, totals = time.monotonic() - self._began_s, self._totals
        metrics = {"stream/per_s": totals["num_messages"] / seconds}
        if self._num_batches:
            metrics["stream/batch"] = totals["num_messages"] / self._num_batches
        for name, values in (("lag", self._lags_ms), ("learn", self._learn_ms)):
            if values:
                middle, high = np.percentile(values, (50, 99))
                metrics |= {f"stream/{name}_p50_ms": float(middle), f"stream/{name}_p99_ms": float(high)}
        if self._commit_ms:
            metrics["stream/commit_ms"] = float(np.median(self._commit_ms))
        if num_forecasts := totals["num_forecasts"]:
            metrics["prequential/mae"] = totals["absolute_error"] / num_forecasts
            metrics["prequential/as_now"] = totals["naive_error"] / num_forecasts
            metrics["prequential/scaled"] = totals["scaled_error"] / num_forecasts
        self._clear()
        return metrics
