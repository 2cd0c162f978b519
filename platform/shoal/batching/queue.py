"""One model's queue in a batcher: accepts requests, resolves their futures and computes its batches.

Owns the futures, the deadlines and the counts of its requests, and the forward. Made by `Batcher.add_queue`. The
model's owner calls `submit` on the event loop; the batcher's threads call `compute`. The scheduler owns the order of
waiting requests.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from shoal.batching.fair_queue import QueuedRequest
from shoal.batching.latency_model import LatencyModel
from shoal.batching.scheduler import Batch, BatchScheduler, DeadlineExceeded, QueueFull, QueueState
from shoal.errors import Closed, InferenceError, ModelError

logger = logging.getLogger(__name__)

GroupT = TypeVar("GroupT", bound=Hashable)
RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
TICK_S = 0.005
MIN_SWEEP_TICKS = 1024  # ticks
ItemT = TypeVar("ItemT")


class Prediction(NamedTuple, Generic[AnswerT]):
    """The outputs for one request, and the version of the weights that computed them.

    queued_s, computed_s: the time the request waited for a slot, and the time of its batch's forward
    batch_rows:           rows of that batch
    """

    outputs: AnswerT
    version: int = 0
    queued_s: float = 0.0
    computed_s: float = 0.0
    batch_rows: int = 1


@dataclass(frozen=True)
class BatcherCounts:
    """Request counts: submitted = answered + failed + cancelled + expired + evicted + (queued or in progress).

    Refused requests were never submitted: `refused_full` with QueueFull, `refused_late` with DeadlineExceeded. Requests
    evicted from a full queue for another tenant are `evicted`, with QueueFull.
    """

    submitted: int = 0
    answered: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    evicted: int = 0
    refused_full: int = 0
    refused_late: int = 0
    batches: int = 0
    rows: int = 0
    queued_rows: int = 0


class ReplyFuture(Protocol[AnswerT]):
    """Where the outcome of a request goes. asyncio's Future is one."""

    def done(self) -> bool: ...

    def set_result(self, result: Prediction[AnswerT], /) -> None: ...

    def set_exception(self, error: Exception, /) -> None: ...


class EventLoop(Protocol):
    """The one thread that submits requests and receives their outcomes. asyncio's loop is one.

    Deadlines and `submit` need asyncio's; any other takes `enqueue`.
    """

    def call_soon(self, callback: Callable[..., object], *arguments: Any) -> object: ...

    def call_soon_threadsafe(self, callback: Callable[..., object], *arguments: Any) -> object: ...

    def is_closed(self) -> bool: ...


class PendingRequest(QueuedRequest, Generic[GroupT, RequestT, AnswerT]):
    """A waiting request and its future. `outcome` names the count under which it ended."""

    __slots__ = ("future", "outcome", "queue", "request")

    group: GroupT
    queue: BatchQueue[GroupT, RequestT, AnswerT]
    request: RequestT
    future: ReplyFuture[AnswerT]
    outcome: str  # set when the future is


PendingBatch = Batch[PendingRequest[GroupT, RequestT, AnswerT]]


Forward = Callable[[PendingBatch[GroupT, RequestT, AnswerT]], Sequence[AnswerT]]


class BatcherState(Generic[GroupT, RequestT, AnswerT]):
    """State shared by the queues and threads of one batcher: the scheduler and the sleeping threads, under one lock."""

    def __init__(
        self, num_slots: int, clock: Callable[[], float], loop: EventLoop, start_batch: Callable[[], object]
    ) -> None:
        """start_batch: called on the loop, after a claimed wake-up"""
        self.scheduler: BatchScheduler[PendingRequest[GroupT, RequestT, AnswerT]] = BatchScheduler(num_slots)
        self.clock = clock
        self.loop = loop
        self.start_batch = start_batch
        self.lock = threading.Lock()
        self.wakeups: SimpleQueue[None] = SimpleQueue()
        self.num_sleeping = 0  # threads that sleep or are about to
        self.is_waking = False  # one of them is being woken, or the loop does its work

    def claim_wakeup(self) -> bool:
        """Whether the caller, which holds the lock and has work, must wake a thread."""
        if self.is_waking or not self.num_sleeping:
            return False
        self.is_waking = True
        return True


class BatchQueue(Generic[GroupT, RequestT, AnswerT]):
    """See `Batcher.add_queue`, which makes it."""

    def __init__(
        self,
        slots: BatcherState[GroupT, RequestT, AnswerT],
        policy: QueueState[PendingRequest[GroupT, RequestT, AnswerT]],
        forward: Forward[GroupT, RequestT, AnswerT],
        on_batch: Callable[[PendingBatch[GroupT, RequestT, AnswerT]], None] | None,
        on_close: Callable[[BatchQueue[GroupT, RequestT, AnswerT]], None],
    ) -> None:
        self.name = policy.name
        self._slots = slots
        self._policy = policy
        self._forward = forward
        self._on_batch = on_batch
        self._on_close = on_close
        self._deadline_timer: DeadlineTimer[PendingRequest[GroupT, RequestT, AnswerT]] = DeadlineTimer(
            slots.clock, self._expire
        )
        self.closed = False
        # Written by the event loop:
        self._counts: Counter[str] = Counter()  # by the fields of BatcherCounts

    @property
    def queued_requests(self) -> int:
        """The number of requests that wait for a slot."""
        with self._slots.lock:
            return sum(1 for _ in self._policy.fair_queue)

    @property
    def queued_rows(self) -> int:
        """Rows that wait for a slot."""
        return self._policy.fair_queue.rows

    @property
    def latency(self) -> LatencyModel:
        """The estimated durations of this queue's forwards."""
        return self._policy.latency

    def counts(self) -> BatcherCounts:
        """The present counts; they add up only while no batch is computed."""
        return BatcherCounts(**self._counts, queued_rows=self.queued_rows)

    async def submit(
        self,
        request: RequestT,
        num_rows: int = 1,
        *,
        group: GroupT,
        deadline_s: float | None = None,
        tenant: str = "",
        size_bytes: int = 0,
    ) -> Prediction[AnswerT]:
        """Answer one request of `num_rows` rows. Cancelling the caller removes the request from the queue.

        group:      requests share a batch only within an equal group
        deadline_s: by the batcher's clock; the request expires at it. None: never
        tenant:     the tenant whose share of a busy queue it uses
        size_bytes: the request's part of the queue's `max_queue_bytes`

        Raises QueueFull (429, with the time to try again; also later, on eviction for another tenant), DeadlineExceeded
        (504, at once when the latency model rules the deadline out, at the deadline otherwise), InferenceError (422)
        for more rows than a batch may hold, Closed, or the error that `forward` raised for this request alone.
        """
        future: asyncio.Future[Prediction[AnswerT]] = asyncio.get_running_loop().create_future()
        entry = self.enqueue(
            request, future, num_rows, group=group, deadline_s=deadline_s, tenant=tenant, size_bytes=size_bytes
        )
        tick = None if deadline_s is None else self._deadline_timer.add(entry, deadline_s)
        try:
            return await future
        except asyncio.CancelledError:
            self._counts["cancelled"] += 1
            if not future.cancelled():
                # It was resolved in the turn in which its caller was cancelled: no caller receives the result.
                self._counts[entry.outcome] -= 1
                future.exception()
            with self._slots.lock:
                self._policy.fair_queue.withdraw(entry)
            raise
        finally:
            if tick is not None:
                self._deadline_timer.discard(entry, tick)

    def enqueue(
        self,
        request: RequestT,
        reply: ReplyFuture[AnswerT],
        num_rows: int = 1,
        *,
        group: GroupT,
        deadline_s: float | None = None,
        tenant: str = "",
        size_bytes: int = 0,
    ) -> PendingRequest[GroupT, RequestT, AnswerT]:
        """`submit` without waiting: the outcome goes to `reply`, on the event loop. No timer watches the deadline."""
        slots, policy = self._slots, self._policy
        if self.closed:
            raise Closed("the batcher is closed")
        if not 1 <= num_rows <= policy.max_batch_rows:
            raise InferenceError(422, f"a request holds 1 to {policy.max_batch_rows} rows, this one has {num_rows}")
        now_s = slots.clock()
        charged_rows = policy.compute_charged_rows(num_rows, size_bytes)
        entry: PendingRequest[GroupT, RequestT, AnswerT] = PendingRequest(
            num_rows, now_s, deadline_s, group, tenant, charged_rows
        )
        entry.queue = self
        entry.request = request
        entry.future = reply
        with slots.lock:
            refusal, evicted = slots.scheduler.admit(policy, entry, now_s)
            full = slots.scheduler.queue_full_error(policy, now_s) if evicted else None
            wake = refusal is None and slots.claim_wakeup()
        if full is not None:
            self.fail_all(evicted, "evicted", full)
        if refusal is not None:
            self._counts["refused_full" if isinstance(refusal, QueueFull) else "refused_late"] += 1
            raise refusal
        self._counts["submitted"] += 1
        if wake:
            # At the end of this turn of the loop, so that requests that arrive together are computed together: a thread
            # woken at once takes the interpreter's lock in the middle of the turn, and a part of the batch.
            slots.loop.call_soon(slots.start_batch)
        return entry

    def seed_latency_model(self, measured: Sequence[tuple[int, float]]) -> None:
        """Seed the latency model with (rows, seconds), before the queue's first forward. Callable from any thread."""
        now_s = self._slots.clock()
        with self._slots.lock:
            for rows, seconds in measured:
                self._policy.latency.observe(rows, seconds, now_s)

    def close(self) -> None:
        """Fail queued requests with Closed and leave the batcher; batches in progress are answered. Idempotent."""
        if self.closed:
            return
        self.closed = True
        with self._slots.lock:
            entries = list(self._policy.fair_queue)
            for entry in entries:
                self._policy.fair_queue.withdraw(entry)
            self._slots.scheduler.remove_queue(self._policy)
        self.fail_all(entries, "failed", Closed("the batcher was closed before this request was computed"))
        self._deadline_timer.close()
        self._on_close(self)

    # What follows runs on the event loop.

    def fail_all(
        self, entries: Sequence[PendingRequest[GroupT, RequestT, AnswerT]], end: str, error: Exception
    ) -> None:
        """Resolve requests that failed, expired or were evicted."""
        for entry in entries:
            if not entry.future.done():
                entry.future.set_exception(error)
                self._counts[end] += 1
                entry.outcome = end

    def fail_late(self, entry: PendingRequest[GroupT, RequestT, AnswerT]) -> None:
        """Fail a removed request that can no longer meet its deadline."""
        self.fail_all([entry], "expired", DeadlineExceeded("the deadline cannot be met any more"))

    def _deliver(self, batch: PendingBatch[GroupT, RequestT, AnswerT], answers: Sequence[AnswerT]) -> None:
        started_s = batch.started_s
        seconds = batch.computed_s
        rows = batch.rows
        version = batch.version
        self._counts["batches"] += 1
        self._counts["rows"] += rows
        num_answered = 0
        for entry, answer in zip(batch.requests, answers, strict=True):
            future = entry.future
            if not future.done():
                num_answered += 1
                entry.outcome = "answered"
                future.set_result(Prediction(answer, version, started_s - entry.arrived_s, seconds, rows))
        self._counts["answered"] += num_answered

    def _expire(self, entry: PendingRequest[GroupT, RequestT, AnswerT]) -> None:
        with self._slots.lock:
            queued = self._policy.fair_queue.withdraw(entry)
        where = "in the queue" if queued else "while it was computed"
        self.fail_all([entry], "expired", DeadlineExceeded(f"the deadline passed {where}"))

    # What follows runs in a forward's thread, or on the event loop.

    def compute(
        self,
        scheduled: PendingBatch[GroupT, RequestT, AnswerT],
        begins: Callable[[float], None],
        tell: Callable[..., object],
    ) -> list[tuple[int, float]]:
        """Answer the requests of a batch, in halves where it fails; returns (rows, seconds) of each successful forward.

        begins: called when each forward begins
        tell:   calls a function with its arguments on the event loop
        """
        clock = self._slots.clock
        succeeded: list[tuple[int, float]] = []
        began_s, batches = scheduled.started_s, [scheduled]
        while batches:
            batch = batches.pop()
            batch.started_s = began_s
            begins(began_s)
            try:
                answers = self._forward(batch)
                if len(answers) != len(batch.requests):
                    raise InferenceError(500, f"{len(answers)} answers came for {len(batch.requests)} requests")
            except BaseException as raised:  # noqa: BLE001 - the thread's top: the caller of the request receives it
                began_s, error = clock(), _to_future_error(raised)
                requests, is_nobodys_fault = batch.requests, isinstance(error, InferenceError) and error.status == 503
                if len(requests) > 1 and not is_nobodys_fault:
                    logger.warning("a batch of %d requests failed (%r): trying its halves", len(requests), error)
                    for half in requests[len(requests) // 2 :], requests[: len(requests) // 2]:
                        if pending := [entry for entry in half if not entry.future.done()]:
                            batches.append(Batch(batch.queue, pending, began_s))
                    continue
                batch.computed_s, batch.failed = began_s - batch.started_s, len(batch.requests)
                tell(self.fail_all, batch.requests, "failed", error)
            else:
                began_s = clock()
                batch.computed_s = began_s - batch.started_s
                tell(self._deliver, batch, answers)
                succeeded.append((batch.rows, batch.computed_s))
            if self._on_batch is not None:
                self._on_batch(batch)
        return succeeded


def _to_future_error(error: BaseException) -> Exception:
    """Wrap SystemExit and its like, which would end the awaiting task, and errors that no future takes."""
    is_answer = isinstance(error, Exception) and not isinstance(error, StopIteration)
    return error if is_answer else ModelError(500, f"the model raised {error!r}")  # type: ignore[return-value]


class DeadlineTimer(Generic[ItemT]):
    """Calls `expired(item)` for each item that is not discarded before its deadline: up to `TICK_S` late, never
    early. One timer for all deadlines of a tick: one for each request would cost more than the rest of its path, and so
    would cancelling each. Unused ticks are swept together. Called on the event loop only."""

    def __init__(self, clock: Callable[[], float], expired: Callable[[ItemT], None]) -> None:
        self._clock, self._on_expired = clock, expired
        self._ticks: dict[int, set[ItemT]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}  # of each tick
        self._sweep_from = MIN_SWEEP_TICKS
        self._closing = False

    def add(self, item: ItemT, deadline_s: float) -> int:
        """Add an item; returns the tick that `discard` takes."""
        tick = int(deadline_s / TICK_S) + 1
        items = self._ticks.get(tick)
        if items is None:
            if len(self._ticks) >= self._sweep_from:
                self._sweep()
            items = self._ticks[tick] = set()
            after_s = tick * TICK_S - self._clock()
            self._timers[tick] = asyncio.get_running_loop().call_later(after_s, self._fire, tick)
        items.add(item)
        return tick

    def discard(self, item: ItemT, tick: int) -> None:
        """Remove an item. It may already have expired."""
        items = self._ticks.get(tick)
        if items is not None:
            items.discard(item)
            if self._closing and not items:
                self._forget(tick)

    def close(self) -> None:
        """Accept no more items. The present ones still expire unless they are discarded."""
        self._closing = True
        self._sweep()

    def _sweep(self) -> None:
        """Drop the ticks that have no items left."""
        for tick in [tick for tick, items in self._ticks.items() if not items]:
            self._forget(tick)
        self._sweep_from = max(MIN_SWEEP_TICKS, 2 * len(self._ticks))

    def _forget(self, tick: int) -> None:
        del self._ticks[tick]
        self._timers.pop(tick).cancel()

    def _fire(self, tick: int) -> None:
        del self._timers[tick]
        for item in self._ticks.pop(tick):
            self._on_expired(item)
