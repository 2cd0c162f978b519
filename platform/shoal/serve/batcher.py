"""Batches without a timeout: a free slot takes what is queued, at once, and never waits for more.

Owns the threads in which forwards run, so the event loop stays free to parse and answer; which batch is next is
decided by `schedule`. While a batch is computed the next requests gather; under load batches grow by themselves, and
an idle endpoint answers a single request as fast as it can. Called by the endpoint's replica, with a queue for each
model; knows no HTTP, no torch, no Ray and not what a request is.

| capacity         | what blocks               | who unblocks           | close()                                      |
|------------------|---------------------------|------------------------|----------------------------------------------|
| `max_queue_rows` | nothing: a full queue     | a batch that is taken, | what is queued fails with Closed, the batch  |
| of each queue    | refuses with QueueFull    | a request that is      | in hand is still answered, the threads end   |
|                  | (429), at once            | cancelled or expires   | (waits up to `timeout_s` for them)           |

Thread rules: the schedule, and who sleeps, are guarded by one lock that nobody holds while computing; futures, timers
and the counts of how requests ended belong to the event loop; results reach it with one call per batch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import astuple, dataclass
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

from shoal.errors import Closed, InferenceError
from shoal.serve.latency import LatencyModel
from shoal.serve.schedule import Batch, QueueFull, QueuePolicy, Schedule, TooLate
from shoal.serve.waiting import Waiting

__all__ = ["BatchQueue", "BatchReport", "Batched", "Batcher", "BatcherCounts", "QueueFull", "TooLate"]

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
Forward = Callable[[Hashable, Sequence[RequestT]], Sequence[AnswerT]]


class Batched(NamedTuple, Generic[AnswerT]):
    """An answer, how long its request waited for a slot, and the forward that made it."""

    answer: AnswerT
    queued_s: float
    computed_s: float
    batch_rows: int


@dataclass(frozen=True, slots=True)
class BatchReport:
    """One forward whose requests were all answered, or all failed. `queued_s` has an entry for each request."""

    queue: str
    group: Hashable
    rows: int
    requests: int
    failed: int
    started_s: float
    computed_s: float
    queued_s: tuple[float, ...]


@dataclass(frozen=True)
class BatcherCounts:
    """What went through. submitted = answered + failed + cancelled + expired + (still queued or in hand).

    Refused requests were never submitted: full is QueueFull, late is TooLate at the door.
    """

    submitted: int = 0
    answered: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    refused_full: int = 0
    refused_late: int = 0
    batches: int = 0
    rows: int = 0
    queued_rows: int = 0


class _Entry(Waiting, Generic[RequestT, AnswerT]):
    """A waiting request, and whom to tell. `end` names the count under which it ended."""

    __slots__ = ("end", "future", "queue", "request")

    queue: BatchQueue[RequestT, AnswerT]
    request: RequestT
    future: asyncio.Future[Batched[AnswerT]]
    end: str


class Batcher(Generic[RequestT, AnswerT]):
    """Runs the forwards of one or more queues over whatever waits in them, in `slots` threads.

    on_thread_start: called once in each thread (thread-local settings)
    clock:           what deadlines are measured by

    Must be made on the event loop that will call it.
    """

    def __init__(
        self,
        *,
        slots: int = 1,
        on_thread_start: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schedule: Schedule[_Entry[RequestT, AnswerT]] = Schedule(slots)
        self._queues: list[BatchQueue[RequestT, AnswerT]] = []
        self._on_thread_start, self._clock = on_thread_start, clock
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._sleeping = 0  # threads that sleep or are about to; guarded by the lock
        self._waking = False  # one of them is being woken; guarded by the lock
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"shoal-forward-{slot}", daemon=True) for slot in range(slots)
        ]
        for thread in self._threads:
            thread.start()

    def add_queue(
        self,
        name: str,
        forward: Forward[RequestT, AnswerT],
        *,
        max_batch_rows: int,
        max_queue_rows: int,
        weight: float = 1.0,
        on_batch: Callable[[BatchReport], None] | None = None,
    ) -> BatchQueue[RequestT, AnswerT]:
        """A queue with a forward of its own, that shares the slots with the others.

        forward:        gets a group and the requests of a batch, all of that group; gives an answer for each, in order.
                        When it raises, the batch is halved until the poisonous request fails alone
        max_batch_rows: a batch never holds more rows; a request is never split
        max_queue_rows: rows that may wait; the next request is refused with QueueFull
        weight:         its share of the slots' time while other queues have work too
        on_batch:       told of every forward, in the forward's thread, after the answers are on their way

        Raises ConfigError for limits that do not fit together, Closed.
        """
        if self._closed:
            raise Closed("the batcher is closed")
        with self._lock:
            policy = self._schedule.add_queue(
                name, max_batch_rows=max_batch_rows, max_queue_rows=max_queue_rows, weight=weight
            )
        queue = BatchQueue(self, policy, forward, on_batch)
        self._queues.append(queue)
        return queue

    @property
    def alive(self) -> bool:
        """Whether every thread is there to answer."""
        return all(thread.is_alive() for thread in self._threads)

    def counts(self) -> BatcherCounts:
        """The sums over all queues there are."""
        each = [astuple(queue.counts()) for queue in self._queues]
        return BatcherCounts(*[sum(column) for column in zip(*each, strict=True)])

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the queues and end the threads; see the table above. Idempotent; call it on the event loop."""
        if not self._closed:
            self._closed = True
            for queue in list(self._queues):
                queue.close()
            for _ in self._threads:
                self._wakeups.put(None)
        ends_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, ends_s - time.monotonic()))

    # What follows runs in the forwards' threads.

    def _run(self) -> None:
        if self._on_thread_start is not None:
            self._on_thread_start()
        try:
            while self._turn():
                self._wakeups.get()
                with self._lock:
                    self._sleeping -= 1
                    self._waking = False
        except RuntimeError:
            if not self._loop.is_closed():
                raise  # else the loop is gone, and with it everybody who waited

    def _turn(self) -> bool:
        """Compute until nothing waits; False when nothing ever will again."""
        batch: Batch[_Entry[RequestT, AnswerT]] | None = None
        forwards: list[tuple[int, float]] = []
        while True:
            with self._lock:
                now_s = self._clock()
                if batch is not None:
                    self._schedule.finished(batch, now_s, forwards)
                batch, late = self._schedule.take(now_s)
                if batch is None:
                    # Said under the lock: a request that comes from now on wakes somebody.
                    self._sleeping += 1
                elif self._sleeping and not self._waking and self._schedule.has_work:
                    self._waking = True
                    self._wakeups.put(None)
            if late:
                self._loop.call_soon_threadsafe(_expire_all, late)
            if batch is None:
                return not self._closed
            forwards = batch.requests[0].queue._compute(batch)


class BatchQueue(Generic[RequestT, AnswerT]):
    """One model's queue in a batcher: see `Batcher.add_queue`, which makes it."""

    def __init__(
        self,
        batcher: Batcher[RequestT, AnswerT],
        policy: QueuePolicy[_Entry[RequestT, AnswerT]],
        forward: Forward[RequestT, AnswerT],
        on_batch: Callable[[BatchReport], None] | None,
    ) -> None:
        self.name = policy.name
        self._batcher, self._policy, self._forward, self._on_batch = batcher, policy, forward, on_batch
        self._closed = False
        self._submitted = self._refused_full = self._refused_late = 0  # written by the loop
        self._ends = dict.fromkeys(("answered", "failed", "cancelled", "expired"), 0)  # written by the loop
        self._batches = self._rows_run = 0  # written by the loop

    @property
    def queued_rows(self) -> int:
        """Rows that wait for a slot."""
        return self._policy.line.rows

    @property
    def latency(self) -> LatencyModel:
        """What is known of this queue's forwards."""
        return self._policy.latency

    def counts(self) -> BatcherCounts:
        """The counters at this moment; they settle only when nothing is in hand."""
        return BatcherCounts(
            submitted=self._submitted,
            **self._ends,
            refused_full=self._refused_full,
            refused_late=self._refused_late,
            batches=self._batches,
            rows=self._rows_run,
            queued_rows=self.queued_rows,
        )

    async def submit(
        self,
        request: RequestT,
        num_rows: int = 1,
        *,
        group: Hashable = None,
        deadline_s: float | None = None,
        tenant: str = "",
    ) -> Batched[AnswerT]:
        """The answer to one request of `num_rows` rows. Cancelling the caller takes the request out of the queue.

        group:      requests share a batch only with equal ones
        deadline_s: by the batcher's clock; after it nobody wants the answer. None: for ever
        tenant:     whose share of a busy queue it comes from

        Raises QueueFull (429, says when to try again), TooLate (504, at once when the latency model says that the
        deadline cannot be met, and at the deadline at the latest), InferenceError (422) for more rows than a batch may
        hold, Closed, or what `forward` raised for this request alone.
        """
        if self._closed:
            raise Closed("the batcher is closed")
        policy, batcher = self._policy, self._batcher
        if not 1 <= num_rows <= policy.max_batch_rows:
            raise InferenceError(422, f"a request holds 1 to {policy.max_batch_rows} rows, this one has {num_rows}")
        now_s = batcher._clock()
        entry: _Entry[RequestT, AnswerT] = _Entry(num_rows, now_s, deadline_s, group, tenant)
        entry.queue, entry.request, entry.future = self, request, batcher._loop.create_future()
        with batcher._lock:
            refusal = batcher._schedule.refusal(policy, entry, now_s)
            wake = refusal is None and batcher._sleeping and not batcher._waking
            if wake:
                batcher._waking = True
        if refusal is not None:
            self._count_refusal(refusal)
            raise refusal
        self._submitted += 1
        if wake:
            # At the end of this turn of the loop, so that what arrived together is computed together.
            batcher._loop.call_soon(batcher._wakeups.put, None)
        if deadline_s is None:
            return await self._answer(entry)
        timer = batcher._loop.call_later(deadline_s - now_s, self._expire, entry)
        try:
            return await self._answer(entry)
        finally:
            timer.cancel()

    def close(self) -> None:
        """Fail what is queued with Closed and leave the batcher; what is in hand is answered. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with self._batcher._lock:
            entries = list(self._policy.line)
            for entry in entries:
                self._policy.line.withdraw(entry)
            self._batcher._schedule.remove_queue(self._policy)
        self._batcher._queues.remove(self)
        for entry in entries:
            self._fail(entry, "failed", Closed("the batcher was closed before this request was computed"))

    # What follows runs on the event loop.

    async def _answer(self, entry: _Entry[RequestT, AnswerT]) -> Batched[AnswerT]:
        try:
            return await entry.future
        except asyncio.CancelledError:
            # A future that is not cancelled was settled in the very turn in which its caller was: nobody gets that.
            if not entry.future.cancelled():
                self._ends[entry.end] -= 1
                entry.future.exception()
            self._ends["cancelled"] += 1
            with self._batcher._lock:
                self._policy.line.withdraw(entry)
            raise

    def _count_refusal(self, refusal: QueueFull | TooLate) -> None:
        if isinstance(refusal, QueueFull):
            self._refused_full += 1
        else:
            self._refused_late += 1

    def _expire(self, entry: _Entry[RequestT, AnswerT]) -> None:
        with self._batcher._lock:
            queued = self._policy.line.withdraw(entry)
        where = "in the queue" if queued else "while it was computed"
        self._fail(entry, "expired", TooLate(f"the deadline passed {where}"))

    def _deliver(
        self, entries: Sequence[_Entry[RequestT, AnswerT]], answers: Sequence[AnswerT], started_s: float, ended_s: float
    ) -> None:
        computed_s, rows = ended_s - started_s, sum([entry.num_rows for entry in entries])
        self._batches += 1
        self._rows_run += rows
        for entry, answer in zip(entries, answers, strict=True):
            if not entry.future.done():
                self._ends["answered"] += 1
                entry.end = "answered"
                entry.future.set_result(Batched(answer, started_s - entry.arrived_s, computed_s, rows))

    def _fail_all(self, entries: Sequence[_Entry[RequestT, AnswerT]], error: Exception) -> None:
        for entry in entries:
            self._fail(entry, "failed", error)

    def _fail(self, entry: _Entry[RequestT, AnswerT], end: str, error: Exception) -> None:
        if not entry.future.done():
            self._ends[end] += 1
            entry.end = end
            entry.future.set_exception(error)

    # What follows runs in a forward's thread.

    def _compute(self, batch: Batch[_Entry[RequestT, AnswerT]]) -> list[tuple[int, float]]:
        """Answer the requests of a batch, in halves where it fails; (rows, seconds) of each forward that succeeded."""
        clock, tell = self._batcher._clock, self._batcher._loop.call_soon_threadsafe
        succeeded: list[tuple[int, float]] = []
        parts: list[Sequence[_Entry[RequestT, AnswerT]]] = [batch.requests]
        started_s = batch.started_s
        while parts:
            part = parts.pop()
            rows = sum([entry.num_rows for entry in part])
            try:
                answers = self._forward(batch.group, [entry.request for entry in part])
                if len(answers) != len(part):
                    raise InferenceError(500, f"{len(answers)} answers came for {len(part)} requests")
            except Exception as error:  # noqa: BLE001 - the thread's top: the error belongs to whoever sent the request
                ended_s = clock()
                if len(part) == 1 or _concerns_all(error):
                    tell(self._fail_all, part, error)
                    self._report(batch.group, part, rows, len(part), started_s, ended_s)
                else:
                    logger.warning("a batch of %d requests failed (%r): trying its halves", len(part), error)
                    parts += [part[len(part) // 2 :], part[: len(part) // 2]]
            else:
                ended_s = clock()
                tell(self._deliver, part, answers, started_s, ended_s)
                succeeded.append((rows, ended_s - started_s))
                self._report(batch.group, part, rows, 0, started_s, ended_s)
            started_s = ended_s
            if parts:
                # Cancelled or expired meanwhile: nobody wants it any more.
                parts = [kept for part in parts if (kept := [entry for entry in part if not entry.future.done()])]
        return succeeded

    def _report(
        self,
        group: Hashable,
        part: Sequence[_Entry[RequestT, AnswerT]],
        rows: int,
        failed: int,
        started_s: float,
        ended_s: float,
    ) -> None:
        if self._on_batch is None:
            return
        queued_s = tuple([started_s - entry.arrived_s for entry in part])
        self._on_batch(BatchReport(self.name, group, rows, len(part), failed, started_s, ended_s - started_s, queued_s))


def _expire_all(late: Sequence[_Entry[RequestT, AnswerT]]) -> None:
    for entry in late:
        entry.queue._fail(entry, "expired", TooLate("the deadline could not be met any more"))


def _concerns_all(error: Exception) -> bool:
    """Whether an error is no single request's fault, so that halving would only repeat it."""
    return isinstance(error, InferenceError) and error.status == 503
