"""How many micro-batches of a step each worker computes, so that a persistently slow one does not hold up the others.

With `sync.balance` a worker's number follows its measured speed, and a gradient counts by its micro-batches. So the
gradient of a step stays the mean over all of its samples. Called by the controller.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Mapping

SMOOTHING = 0.5  # the newest measurement's share of the average


class BatchBalance:
    """The seconds that each worker takes for a micro-batch, averaged, and the division that follows.

    num_batches: of a worker in a step, on average
    """

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches
        self._seconds: dict[int, float] = {}

    def note(self, worker: int, batch_s: float) -> None:
        """A worker has taken so long for a micro-batch of its last step."""
        before = self._seconds.get(worker, batch_s)
        self._seconds[worker] = before + SMOOTHING * (batch_s - before)

    def divide(self, workers: list[int]) -> dict[int, int]:
        """Micro-batches of each worker in the next step."""
        known = [self._seconds[worker] for worker in workers if worker in self._seconds]
        usual = statistics.mean(known) if known else 1.0
        seconds = {worker: self._seconds.get(worker, usual) for worker in workers}
        return divide_batches(self._num_batches * len(workers), seconds)


def divide_batches(num_batches: int, seconds: Mapping[int, float]) -> dict[int, int]:
    """Divide micro-batches among workers so that the last one ends as early as possible; each gets at least one.

    seconds: that a worker takes for one

    Each batch goes to the worker that would end it first, which is optimal for equal batches.
    """
    found = dict.fromkeys(seconds, 1)
    ends = [(2 * each, worker) for worker, each in seconds.items()]
    heapq.heapify(ends)
    for _ in range(num_batches - len(found)):
        end, worker = ends[0]
        found[worker] += 1
        heapq.heapreplace(ends, (end + seconds[worker], worker))
    return found
