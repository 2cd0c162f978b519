"""What the best possible server would do, computed: one slot, never idle while a request waits, batches as they come.

Called by the benchmarks that know what a forward costs. Exact arrivals in, latencies out; no clock, no server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

FIXED_S, ROW_S, MAX_ROWS = 0.020, 0.0005, 32
CAPACITY = MAX_ROWS / (FIXED_S + ROW_S * MAX_ROWS)  # requests a second, with full batches


def work_conserving(arrivals_s: Sequence[float]) -> np.ndarray:
    """Latency of each request, in order of arrival: a slot that is free takes all that waits, up to a batch."""
    free_s, latencies_s, index = 0.0, [], 0
    while index < len(arrivals_s):
        start_s = max(free_s, arrivals_s[index])
        end = index
        while end < len(arrivals_s) and end - index < MAX_ROWS and arrivals_s[end] <= start_s:
            end += 1
        free_s = start_s + FIXED_S + ROW_S * (end - index)
        latencies_s += [free_s - one for one in arrivals_s[index:end]]
        index = end
    return np.array(latencies_s)


def with_window(arrivals_s: Sequence[float], window_s: float) -> np.ndarray:
    """The classic batcher: a batch waits until it is full or its first request has waited for `window_s`."""
    waiting: deque[float] = deque()
    free_s, latencies_s, index = 0.0, [], 0
    while index < len(arrivals_s) or waiting:
        if not waiting:
            waiting.append(arrivals_s[index])
            index += 1
        due_s = max(free_s, waiting[0] + window_s)
        while index < len(arrivals_s) and len(waiting) < MAX_ROWS and arrivals_s[index] <= due_s:
            waiting.append(arrivals_s[index])
            index += 1
        start_s = max(free_s, waiting[-1]) if len(waiting) == MAX_ROWS else due_s
        free_s = start_s + FIXED_S + ROW_S * len(waiting)
        latencies_s += [free_s - one for one in waiting]
        waiting.clear()
    return np.array(latencies_s)
