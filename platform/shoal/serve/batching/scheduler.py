"""Which batch a free slot computes next, and which request is refused: the batcher's policy, without threads or clocks.

Owns the waiting lines of all models of a replica, the batches in hand and the models' shares. Called by the batcher
(under its lock) and by the simulation, which is why `now_s` is always given. Decides, and never acts: it starts no
forward, settles no future and reads no clock.

- A free slot takes at once what waits; nothing is ever held back for more to come.
- Between models: the one that has used the least time for its weight goes first (start-time fair queueing, charged with
  the time its forwards really took). Within a model: see `waiting`.
- A request with a deadline is refused at the door when the latency model says it cannot make it; never when a slot is
  free and nobody waits, since trying costs nobody anything and is how a wrong model learns. With slots `s`, l(rows) and
  the lines as they stand, its answer is expected at: a slot is free + (l of what goes before it)/s + l(its own batch).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Generic

from shoal.errors import ConfigError, InferenceError
from shoal.serve.batching.fair_queue import FairQueue, QueuedT
from shoal.serve.batching.latency_model import OBSERVED_EVERY_S, LatencyModel

DEMAND_SPAN_S = 0.05
MIN_RETRY_AFTER_S = 0.001  # no client comes back sooner


class QueueFull(InferenceError):
    """The queue has no room for the request; `retry_after_s` is when what waits now should have been served."""

    def __init__(self, max_queue_rows: int, retry_after_s: float, max_queue_bytes: int | None = None) -> None:
        self.max_queue_rows, self.max_queue_bytes = max_queue_rows, max_queue_bytes
        holds = f"{max_queue_rows} rows" + ("" if max_queue_bytes is None else f", or {max_queue_bytes} bytes")
        soon = "at once" if retry_after_s < MIN_RETRY_AFTER_S else f"in {retry_after_s:.3g} s"
        super().__init__(429, f"the queue is full (it holds {holds}); try again {soon}", retry_after_s)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.max_queue_rows, self.retry_after_s, self.max_queue_bytes))


class DeadlineExceeded(InferenceError):
    """The request cannot be answered before its deadline, or was not."""

    def __init__(self, message: str) -> None:
        super().__init__(504, message)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.message,))


class QueueState(Generic[QueuedT]):
    """One model's line, limits, latency and used share. Made by `Schedule.add_queue`."""

    def __init__(
        self, name: str, max_batch_rows: int, max_queue_rows: int, max_queue_bytes: int | None, weight: float
    ) -> None:
        """Raises ConfigError for limits that do not fit together."""
        if max_batch_rows < 1:
            raise ConfigError("max_batch_rows", max_batch_rows, "a batch holds at least one row")
        if max_queue_rows < max_batch_rows:
            raise ConfigError("max_queue_rows", max_queue_rows, "is below one batch", f"at least {max_batch_rows}")
        if max_queue_bytes is not None and max_queue_bytes < 1:
            raise ConfigError("max_queue_bytes", max_queue_bytes, "a queue holds at least one byte")
        if not weight > 0:
            raise ConfigError("weight", weight, "a share is above 0")
        self.name, self.weight = name, weight
        self.max_batch_rows, self.max_queue_rows, self.max_queue_bytes = max_batch_rows, max_queue_rows, max_queue_bytes
        self._bytes_per_row = math.inf if max_queue_bytes is None else max_queue_bytes / max_queue_rows
        self.latency = LatencyModel()
        self.fair_queue: FairQueue[QueuedT] = FairQueue(max_batch_rows, self.latency)
        self.requested_rows = 0  # since `_asked_from_s`, refused ones too
        self.requested_rows_per_s = 0.0
        self._demand_since_s = -math.inf
        self.used_s = 0.0  # virtual time: seconds of forwards over weight
        self.observes_from_s = -math.inf

    def compute_charged_rows(self, num_rows: int, size_bytes: int) -> int:
        """What a request takes of the queue's `max_queue_rows` places: one for each row, more for large rows."""
        if size_bytes <= num_rows * self._bytes_per_row:
            return num_rows
        return min(math.ceil(size_bytes / self._bytes_per_row), self.max_queue_rows)

    def measure_demand(self, now_s: float) -> None:
        """Renew `asked_rows_per_s`, when the last time was not just now."""
        span_s = now_s - self._demand_since_s
        if span_s >= DEMAND_SPAN_S:
            self.requested_rows_per_s = (self.requested_rows_per_s + self.requested_rows / span_s) / 2
            self.requested_rows, self._demand_since_s = 0, now_s


class ScheduledBatch(Generic[QueuedT]):
    """Requests of one queue and one group that are computed together."""

    __slots__ = ("expected_s", "group", "queue", "requests", "rows", "started_s")

    def __init__(self, queue: QueueState[QueuedT], requests: Sequence[QueuedT], started_s: float) -> None:
        self.queue, self.requests, self.started_s = queue, requests, started_s
        self.group: Hashable = requests[0].group
        self.rows = sum([request.num_rows for request in requests])
        self.expected_s = queue.latency.seconds(self.rows)


class BatchScheduler(Generic[QueuedT]):
    """The policy over `slots` slots. Not thread-safe: whoever calls it holds a lock, or is alone."""

    def __init__(self, slots: int = 1) -> None:
        if slots < 1:
            raise ConfigError("slots", slots, "a batcher has at least one slot")
        self.slots = slots
        self.running: list[ScheduledBatch[QueuedT]] = []
        self._queues: list[QueueState[QueuedT]] = []
        self._used_s = 0.0  # the virtual time of the queue that was served last

    def add_queue(
        self,
        name: str,
        *,
        max_batch_rows: int,
        max_queue_rows: int,
        max_queue_bytes: int | None = None,
        weight: float = 1.0,
    ) -> QueueState[QueuedT]:
        """Raises ConfigError for limits that do not fit together."""
        queue: QueueState[QueuedT] = QueueState(name, max_batch_rows, max_queue_rows, max_queue_bytes, weight)
        self._queues.append(queue)
        return queue

    def remove_queue(self, queue: QueueState[QueuedT]) -> None:
        """Forget a queue, whose line its owner has emptied."""
        self._queues.remove(queue)

    @property
    def has_work(self) -> bool:
        """Whether anything waits."""
        return any(queue.fair_queue.rows for queue in self._queues)

    def admit(
        self, queue: QueueState[QueuedT], waiting: QueuedT, now_s: float
    ) -> tuple[QueueFull | DeadlineExceeded | None, Sequence[QueuedT]]:
        """Why this request is not taken in, or None when it was; and the requests that had to leave for it.

        A full queue belongs to its tenants in equal parts: one that holds less takes from the one that holds the most.
        """
        line = queue.fair_queue
        queue.requested_rows += waiting.num_rows
        excess_places = line.charged_rows + waiting.charged_rows - queue.max_queue_rows
        if excess_places > 0 and not line.can_evict(excess_places, waiting):
            return self.queue_full_error(queue, now_s), ()
        if waiting.deadline_s is not None:
            if waiting.deadline_s <= now_s:
                return DeadlineExceeded("the deadline had passed when the request came"), ()
            if line.rows or len(self.running) >= self.slots:
                before_s, rows = line.estimate_wait(waiting)
                start_s = self._estimate_start_s(queue, before_s, now_s)
                # Who asks until then will share its batch, and make it longer. Without this, requests with little time
                # left would be let in when there are many, and force small batches just when large ones are needed.
                rows = min(queue.max_batch_rows, rows + queue.requested_rows_per_s * (start_s - now_s))
                ends_s = start_s + queue.latency.seconds(rows)
                if ends_s > waiting.deadline_s:
                    return DeadlineExceeded(
                        f"the answer would come {ends_s - now_s:.3f} s from now, "
                        f"the deadline is {waiting.deadline_s - now_s:.3f} s from now"
                    ), ()
        if not line.rows and queue.used_s < self._used_s:
            queue.used_s = self._used_s  # what it did not use while it was idle is gone
        evicted = line.evict(excess_places) if excess_places > 0 else ()
        line.add(waiting)
        return None, evicted

    def queue_full_error(self, queue: QueueState[QueuedT], now_s: float) -> QueueFull:
        """What is said to a request for which this queue has no room."""
        retry_after_s = self._estimate_start_s(queue, queue.fair_queue.estimate_total_s(), now_s) - now_s
        return QueueFull(queue.max_queue_rows, retry_after_s, queue.max_queue_bytes)

    def take(self, now_s: float) -> tuple[ScheduledBatch[QueuedT] | None, list[QueuedT]]:
        """The next batch for a free slot, or None when nothing waits; and the requests that are too late.

        The batch is in hand until `finished` is called with it.
        """
        late: list[QueuedT] = []
        while (queue := self._select_queue()) is not None:
            requests, too_late = queue.fair_queue.take(now_s)
            late += too_late
            if requests:
                self._used_s = queue.used_s
                queue.measure_demand(now_s)
                batch: ScheduledBatch[QueuedT] = ScheduledBatch(queue, requests, now_s)
                queue.used_s += batch.expected_s / queue.weight
                self.running.append(batch)
                return batch, late
        return None, late

    def finish_batch(self, batch: ScheduledBatch[QueuedT], now_s: float, forwards: Sequence[tuple[int, float]]) -> None:
        """The slot is free again: charge the queue with what its batch took, and learn from it.

        forwards: (rows, seconds) of each forward that succeeded; more than one when the batch was split
        """
        self.running.remove(batch)
        queue = batch.queue
        queue.used_s += (now_s - batch.started_s - batch.expected_s) / queue.weight
        if now_s >= queue.observes_from_s:
            queue.observes_from_s = now_s + OBSERVED_EVERY_S
            for rows, seconds in forwards:
                queue.latency.observe(rows, seconds, now_s)

    def _select_queue(self) -> QueueState[QueuedT] | None:
        """Of those with work, the one that has used the least."""
        least: QueueState[QueuedT] | None = None
        for queue in self._queues:
            if queue.fair_queue.rows and (least is None or queue.used_s < least.used_s):
                least = queue
        return least

    def _estimate_start_s(self, queue: QueueState[QueuedT], before_s: float, now_s: float) -> float:
        """When a batch of this queue starts that has forwards of `before_s` of the same queue before it."""
        free_s = now_s
        if len(self.running) >= self.slots:
            # A forward that takes longer than expected is taken to last as long again: when one hangs, who has little
            # time hears so at once.
            free_s += min([abs(batch.started_s + batch.expected_s - now_s) for batch in self.running])
        others_s = 0.0
        for other in self._queues:
            if other is not queue and other.fair_queue.rows:
                others_s += min(other.fair_queue.estimate_total_s(), before_s * other.weight / queue.weight)
        return free_s + (before_s + others_s) / self.slots
