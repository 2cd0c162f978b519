"""The classic batcher on the simulated clock of `shoal.libs.capacity.simulation`: what ours is compared with.

With a timeout of zero it is the oracle: whenever it is free it takes what there is, first come first.
"""

from __future__ import annotations

import math
from collections import deque


class ClassicServer:
    """The classic batcher: a free slot waits until a batch is full or its oldest request has waited `timeout_s`."""

    def __init__(self, max_batch_rows: int, timeout_s: float) -> None:
        self._max_batch_rows, self._timeout_s = max_batch_rows, timeout_s
        self._queue: deque[tuple[int, float]] = deque()

    def arrive(self, number: int, now_s: float, deadline_s: float | None) -> bool:
        self._queue.append((number, now_s))
        return True

    def start(self, now_s: float) -> list[int]:
        if len(self._queue) < self._max_batch_rows and now_s < self.due_s():
            return []
        return [self._queue.popleft()[0] for _ in range(min(len(self._queue), self._max_batch_rows))]

    def finish(self, batch: list[int], now_s: float, seconds: float) -> None:
        pass

    def due_s(self) -> float:
        return self._queue[0][1] + self._timeout_s if self._queue else math.inf
