"""The batcher's policy, without threads or clocks: selects the next batch of a free slot and refuses requests.

Owns the queues of all models of a replica, the batches in progress and the models' shares. Called by the batcher (under
its lock) and by the simulation, so every call passes `now_s`. Decides and never acts: it starts no forward, resolves no
future and reads no clock.

- A free slot takes waiting requests at once; it never waits for more.
- Between models: the one that has used the least time for its weight goes first (start-time fair queueing, charged with
  the measured time of its forwards). Within a model: see `fair_queue`.
- A request with a deadline is refused on arrival when the latency model predicts that it will miss it; never when a
  slot is free and no request waits, since trying is free and corrects a wrong model. With slots `s`, l(rows) and the
  present queues, its answer is expected at: a slot is free + (l of the rows before it)/s + l(its own batch).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic, NotRequired, TypedDict, Unpack

from shoal.batching.fair_queue import FairQueue, QueuedT
from shoal.batching.latency_model import OBSERVED_EVERY_S, LatencyModel
from shoal.errors import ConfigError, InferenceError

DEMAND_SPAN_S = 0.05
# A batch that takes so long blocks all other work where it was to be short: for so long the queue's are not.
LONG_S, NOT_SHORT_FOR_S = 0.1, 600.0
MIN_RETRY_AFTER_S = 0.001  # the shortest time after which a client retries


class QueueFull(InferenceError):
    """The queue has no room for the request; by `retry_after_s` the present requests should have been served."""

    def __init__(self, max_queue_rows: int, retry_after_s: float, max_queue_bytes: int | None = None) -> None:
        self.max_queue_rows, self.max_queue_bytes = max_queue_rows, max_queue_bytes
        holds = f"{max_queue_rows} rows" + ("" if max_queue_bytes is None else f", or {max_queue_bytes} bytes")
        soon = "at once" if retry_after_s < MIN_RETRY_AFTER_S else f"in {retry_after_s:.3g} s"
        super().__init__(429, f"the queue is full (it holds {holds}); try again {soon}", retry_after_s)


class DeadlineExceeded(InferenceError):
    """The request cannot be answered before its deadline, or was not."""

    def __init__(self, message: str) -> None:
        super().__init__(504, message)


class QueueLimits(TypedDict):
    """The limits of a queue.

    max_batch_rows:  most rows in a batch; a request is never split
    max_queue_rows:  most rows that may wait; beyond it, the tenant with the most waiting rows gets QueueFull
    max_queue_bytes: the same limit in bytes, for requests with large rows; None: no limit
    weight:          its share of the slots' time while other queues have work
    short_s:         a batch that is expected to take no longer is computed on the event loop: a thread's wake-up for
                     it would cost more than it takes. 0: none
    """

    max_batch_rows: int
    max_queue_rows: int
    max_queue_bytes: NotRequired[int | None]
    weight: NotRequired[float]
    short_s: NotRequired[float]


class QueueState(Generic[QueuedT]):
    """One model's queue, limits, latency and used share. Made by `BatchScheduler.add_queue`.

    Raises ConfigError for limits that do not fit together.
    """

    def __init__(
        self,
        name: str,
        *,
        max_batch_rows: int,
        max_queue_rows: int,
        max_queue_bytes: int | None = None,
        weight: float = 1.0,
        short_s: float = 0.0,
    ) -> None:
        if max_batch_rows < 1:
            raise ConfigError("max_batch_rows", max_batch_rows, "a batch holds at least one row")
        if max_queue_rows < max_batch_rows:
            raise ConfigError("max_queue_rows", max_queue_rows, "is below one batch", f"at least {max_batch_rows}")
        if max_queue_bytes is not None and max_queue_bytes < 1:
            raise ConfigError("max_queue_bytes", max_queue_bytes, "a queue holds at least one byte")
        if not weight > 0:
            raise ConfigError("weight", weight, "a share is above 0")
        self.name = name
        self.weight = weight
        self.short_s = short_s
        self.not_short_until_s = -math.inf  # after a long batch
        self.max_batch_rows = max_batch_rows
        self.max_queue_rows = max_queue_rows
        self.max_queue_bytes = max_queue_bytes
        self._bytes_per_row = math.inf if max_queue_bytes is None else max_queue_bytes / max_queue_rows
        self.latency = LatencyModel()
        self.fair_queue: FairQueue[QueuedT] = FairQueue(max_batch_rows, self.latency)
        self.requested_rows = 0  # since `_demand_since_s`, refused ones too
        self.requested_rows_per_s = 0.0
        self._demand_since_s = -math.inf
        self.used_s = 0.0  # virtual time: seconds of forwards over weight
        self.observes_from_s = -math.inf

    def compute_charged_rows(self, num_rows: int, size_bytes: int) -> int:
        """The request's part of the `max_queue_rows` places: one for each row, more for large rows."""
        if size_bytes <= num_rows * self._bytes_per_row:
            return num_rows
        return min(math.ceil(size_bytes / self._bytes_per_row), self.max_queue_rows)

    def measure_demand(self, now_s: float) -> None:
        """Update `requested_rows_per_s`, unless that was done just before."""
        span_s = now_s - self._demand_since_s
        if span_s >= DEMAND_SPAN_S:
            self.requested_rows_per_s = (self.requested_rows_per_s + self.requested_rows / span_s) / 2
            self.requested_rows, self._demand_since_s = 0, now_s


class Batch(Generic[QueuedT]):
    """Requests of one queue and one group that are computed together: taken, given to the forward, and reported.

    started_s:  when its forward began, and `computed_s` how long it took, by the batcher's clock
    failed:     the number of its requests that failed: none or all
    version:    of the weights that computed it; set by the forward, 0 for one without versions
    is_alone:   no other version has computed it too, so its time is this version's; set by the forward
    """

    __slots__ = (
        "computed_s", "expected_s", "failed", "is_alone", "queue", "requests", "rows", "started_s", "version"
    )  # fmt: skip

    def __init__(self, queue: QueueState[QueuedT], requests: Sequence[QueuedT], started_s: float) -> None:
        self.queue = queue
        self.requests = requests
        self.started_s = started_s
        self.rows = sum([request.num_rows for request in requests])
        self.expected_s = queue.latency.seconds(self.rows)
        self.computed_s = 0.0
        self.failed = 0
        self.version = 0
        self.is_alone = True


class BatchScheduler(Generic[QueuedT]):
    """The policy over `slots` slots. Not thread-safe: the caller holds a lock or is the only one."""

    def __init__(self, slots: int = 1) -> None:
        if slots < 1:
            raise ConfigError("slots", slots, "a batcher has at least one slot")
        self.slots = slots
        self.running: list[Batch[QueuedT]] = []
        self._queues: list[QueueState[QueuedT]] = []
        self._used_s = 0.0  # the virtual time of the queue that was served last

    def add_queue(self, name: str, **limits: Unpack[QueueLimits]) -> QueueState[QueuedT]:
        """Add a queue. Raises ConfigError for limits that do not fit together."""
        queue: QueueState[QueuedT] = QueueState(name, **limits)
        self._queues.append(queue)
        return queue

    def remove_queue(self, queue: QueueState[QueuedT]) -> None:
        """Remove a queue that its owner has emptied."""
        self._queues.remove(queue)

    @property
    def has_work(self) -> bool:
        """Whether a request waits."""
        return any(queue.fair_queue.rows for queue in self._queues)

    def is_next_short(self, now_s: float) -> bool:
        """Whether the next batch is expected to take no longer than its queue's `short_s`."""
        queue = self._select_queue()
        if queue is None or not queue.short_s or now_s < queue.not_short_until_s:
            return False
        return 0.0 < queue.latency.seconds(min(queue.fair_queue.rows, queue.max_batch_rows)) <= queue.short_s

    def admit(
        self, queue: QueueState[QueuedT], waiting: QueuedT, now_s: float
    ) -> tuple[QueueFull | DeadlineExceeded | None, Sequence[QueuedT]]:
        """Admit a request; returns the error that refuses it or None, and the requests evicted for it.

        A full queue is divided equally between tenants: a smaller tenant evicts requests of the largest one.
        """
        line = queue.fair_queue
        queue.requested_rows += waiting.num_rows
        excess_places = line.charged_rows + waiting.charged_rows - queue.max_queue_rows
        if excess_places > 0 and not line.may_displace_largest_tenant(waiting, excess_places):
            return self.queue_full_error(queue, now_s), ()
        if waiting.deadline_s is not None:
            if waiting.deadline_s <= now_s:
                return DeadlineExceeded("the deadline had passed when the request came"), ()
            if line.rows or len(self.running) >= self.slots:
                before_s, rows = line.estimate_wait(waiting)
                start_s = self._estimate_start_s(queue, before_s, now_s)
                # Requests that arrive until then will share its batch and make it longer. Without this, requests with
                # little time left would be admitted under load and force small batches just when large ones are needed.
                rows = min(queue.max_batch_rows, rows + queue.requested_rows_per_s * (start_s - now_s))
                ends_s = start_s + queue.latency.seconds(rows)
                if ends_s > waiting.deadline_s:
                    return DeadlineExceeded(
                        f"the answer would come {ends_s - now_s:.3f} s from now, "
                        f"the deadline is {waiting.deadline_s - now_s:.3f} s from now"
                    ), ()
        if not line.rows and queue.used_s < self._used_s:
            queue.used_s = self._used_s  # an idle queue's unused share is lost
        evicted = line.evict(excess_places) if excess_places > 0 else ()
        line.add(waiting)
        return None, evicted

    def queue_full_error(self, queue: QueueState[QueuedT], now_s: float) -> QueueFull:
        """The error of a request for which this queue has no room."""
        retry_after_s = self._estimate_start_s(queue, queue.fair_queue.estimate_total_s(), now_s) - now_s
        return QueueFull(queue.max_queue_rows, retry_after_s, queue.max_queue_bytes)

    def take(self, now_s: float) -> tuple[Batch[QueuedT] | None, list[QueuedT]]:
        """Take the next batch for a free slot, or None when no request waits; also returns the requests that are too
        late.

        The batch is in progress until `finish_batch` is called with it.
        """
        late: list[QueuedT] = []
        while (queue := self._select_queue()) is not None:
            requests, too_late = queue.fair_queue.take(now_s)
            late += too_late
            if requests:
                self._used_s = queue.used_s
                queue.measure_demand(now_s)
                batch: Batch[QueuedT] = Batch(queue, requests, now_s)
                queue.used_s += batch.expected_s / queue.weight
                self.running.append(batch)
                return batch, late
        return None, late

    def finish_batch(self, batch: Batch[QueuedT], now_s: float, forwards: Sequence[tuple[int, float]]) -> None:
        """Free the slot, charge the queue with its batch's time, and learn from it.

        forwards: (rows, seconds) of each forward that succeeded; more than one when the batch was split
        """
        self.running.remove(batch)
        queue = batch.queue
        if now_s - batch.started_s > LONG_S:
            queue.not_short_until_s = now_s + NOT_SHORT_FOR_S
        queue.used_s += (now_s - batch.started_s - batch.expected_s) / queue.weight
        if now_s >= queue.observes_from_s:
            queue.observes_from_s = now_s + OBSERVED_EVERY_S
            for rows, seconds in forwards:
                queue.latency.observe(rows, seconds, now_s)

    def _select_queue(self) -> QueueState[QueuedT] | None:
        """Select the queue with work that has used the least of its share."""
        least: QueueState[QueuedT] | None = None
        for queue in self._queues:
            if queue.fair_queue.rows and (least is None or queue.used_s < least.used_s):
                least = queue
        return least

    def _estimate_start_s(self, queue: QueueState[QueuedT], before_s: float, now_s: float) -> float:
        """Estimate the start of a batch that has `before_s` of forwards of the same queue before it."""
        free_s = now_s
        if len(self.running) >= self.slots:
            # A forward that takes longer than expected counts as lasting as long again: when one hangs, requests with
            # little time left are refused at once.
            free_s += min([abs(batch.started_s + batch.expected_s - now_s) for batch in self.running])
        others_s = 0.0
        for other in self._queues:
            if other is not queue and other.fair_queue.rows:
                others_s += min(other.fair_queue.estimate_total_s(), before_s * other.weight / queue.weight)
        return free_s + (before_s + others_s) / self.slots
