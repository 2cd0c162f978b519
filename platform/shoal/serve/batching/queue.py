"""One model's queue in a batcher: takes requests in, tells each how it ended, and computes the batches it is given.

Owns the futures, the deadlines and the counts of its requests, and the forward. Made by `Batcher.add_queue`, called by
whoever hosts the model (`submit`, on the event loop) and by the batcher's threads (`compute`). What waits, and in which
order, is the schedule's affair.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from shoal.errors import Closed, InferenceError
from shoal.serve.batching.deadline_timer import DeadlineTimer
from shoal.serve.batching.fair_queue import QueuedRequest
from shoal.serve.batching.latency_model import LatencyModel
from shoal.serve.batching.scheduler import BatchScheduler, DeadlineExceeded, QueueFull, QueueState, ScheduledBatch

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
Forward = Callable[[Hashable, Sequence[RequestT]], Sequence[AnswerT]]


class BatchedAnswer(NamedTuple, Generic[AnswerT]):
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
    """What went through. submitted = answered + failed + cancelled + expired + evicted + (still queued or in hand).

    Refused requests were never submitted: `refused_full` with QueueFull, `refused_late` with TooLate. Those that had to
    leave a full queue for another tenant's are `evicted`, with QueueFull.
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


class PendingRequest(QueuedRequest, Generic[RequestT, AnswerT]):
    """A waiting request, and whom to tell. `end` names the count under which it ended."""

    __slots__ = ("future", "outcome", "queue", "request")

    queue: BatchQueue[RequestT, AnswerT]
    request: RequestT
    future: asyncio.Future[BatchedAnswer[AnswerT]]
    outcome: str  # set when the future is


EntryT = TypeVar("EntryT", bound=PendingRequest[Any, Any])


class BatcherState(Generic[RequestT, AnswerT]):
    """What the queues and the threads of one batcher share: the schedule, and who sleeps, under one lock."""

    def __init__(self, num_slots: int, clock: Callable[[], float], loop: asyncio.AbstractEventLoop) -> None:
        self.scheduler: BatchScheduler[PendingRequest[RequestT, AnswerT]] = BatchScheduler(num_slots)
        self.clock, self.loop = clock, loop
        self.lock = threading.Lock()
        self.wakeups: SimpleQueue[None] = SimpleQueue()
        self.num_sleeping = 0  # threads that sleep or are about to
        self.is_waking = False  # one of them is being woken

    def claim_wakeup(self) -> bool:
        """Whether the caller, who holds the lock and knows of work, must put a wakeup."""
        if self.is_waking or not self.num_sleeping:
            return False
        self.is_waking = True
        return True


class BatchQueue(Generic[RequestT, AnswerT]):
    """See `Batcher.add_queue`, which makes it."""

    def __init__(
        self,
        slots: BatcherState[RequestT, AnswerT],
        policy: QueueState[PendingRequest[RequestT, AnswerT]],
        forward: Forward[RequestT, AnswerT],
        on_batch: Callable[[BatchReport], None] | None,
        on_close: Callable[[BatchQueue[RequestT, AnswerT]], None],
    ) -> None:
        self.name = policy.name
        self._slots, self._policy, self._forward, self._on_batch = slots, policy, forward, on_batch
        self._on_close = on_close
        self._deadline_timer: DeadlineTimer[PendingRequest[RequestT, AnswerT]] = DeadlineTimer(
            slots.loop, slots.clock, self._expire
        )
        self.closed = False
        # Written by the event loop:
        self._submitted = self._refused_full = self._refused_late = self._batches = self._rows_run = 0
        self._outcome_counts = dict.fromkeys(("answered", "failed", "cancelled", "expired", "evicted"), 0)

    @property
    def queued_requests(self) -> int:
        """How many requests wait for a slot."""
        with self._slots.lock:
            return sum(1 for _ in self._policy.fair_queue)

    @property
    def queued_rows(self) -> int:
        """Rows that wait for a slot."""
        return self._policy.fair_queue.rows

    @property
    def latency(self) -> LatencyModel:
        """What is known of this queue's forwards."""
        return self._policy.latency

    def counts(self) -> BatcherCounts:
        """The counters at this moment; they settle only when nothing is in hand."""
        return BatcherCounts(
            submitted=self._submitted,
            **self._outcome_counts,
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
        size_bytes: int = 0,
    ) -> BatchedAnswer[AnswerT]:
        """The answer to one request of `num_rows` rows. Cancelling the caller takes the request out of the queue.

        group:      requests share a batch only with equal ones
        deadline_s: by the batcher's clock; after it nobody wants the answer. None: for ever
        tenant:     whose share of a busy queue it comes from
        size_bytes: of the request: what it takes of the queue's `max_queue_bytes`

        Raises QueueFull (429, says when to try again; after a while too, for another tenant's sake), TooLate (504, at
        once when the latency model says that the deadline cannot be met, and at the deadline at the latest),
        InferenceError (422) for more rows than a batch may hold, Closed, or what `forward` raised for this request
        alone.
        """
        slots, policy = self._slots, self._policy
        if self.closed:
            raise Closed("the batcher is closed")
        if not 1 <= num_rows <= policy.max_batch_rows:
            raise InferenceError(422, f"a request holds 1 to {policy.max_batch_rows} rows, this one has {num_rows}")
        now_s = slots.clock()
        places = policy.compute_charged_rows(num_rows, size_bytes)
        entry: PendingRequest[RequestT, AnswerT] = PendingRequest(num_rows, now_s, deadline_s, group, tenant, places)
        entry.queue, entry.request, entry.future = self, request, slots.loop.create_future()
        with slots.lock:
            refusal, evicted = slots.scheduler.admit(policy, entry, now_s)
            full = slots.scheduler.queue_full_error(policy, now_s) if evicted else None
            wake = refusal is None and slots.claim_wakeup()
        if full is not None:
            self.fail_all(evicted, "evicted", full)
        if refusal is not None:
            self._count_rejection(refusal)
            raise refusal
        self._submitted += 1
        if wake:
            # At the end of this turn of the loop, so that what arrived together is computed together: a thread woken at
            # once takes the interpreter's lock in the middle of the turn, and a part of the batch.
            slots.loop.call_soon(slots.wakeups.put, None)
        tick = None if deadline_s is None else self._deadline_timer.add(entry, deadline_s)
        try:
            return await entry.future
        except asyncio.CancelledError:
            self._withdraw(entry)
            raise
        finally:
            if tick is not None:
                self._deadline_timer.discard(entry, tick)

    def seed_latency_model(self, measured: Sequence[tuple[int, float]]) -> None:
        """What is known of this queue's forwards, as (rows, seconds), before it has had any. From any thread."""
        now_s = self._slots.clock()
        with self._slots.lock:
            for rows, seconds in measured:
                self._policy.latency.observe(rows, seconds, now_s)

    def close(self) -> None:
        """Fail what is queued with Closed and leave the batcher; what is in hand is answered. Idempotent."""
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

    def fail_all(self, entries: Sequence[PendingRequest[RequestT, AnswerT]], end: str, error: Exception) -> None:
        """Tell requests that they failed, expired or had to leave."""
        for entry in entries:
            if not entry.future.done():
                entry.future.set_exception(error)
                self._outcome_counts[end] += 1
                entry.outcome = end

    def fail_late(self, entry: PendingRequest[RequestT, AnswerT]) -> None:
        """Tell a request, which has left the line, that its deadline cannot be met any more."""
        self.fail_all([entry], "expired", DeadlineExceeded("the deadline cannot be met any more"))

    def _deliver(
        self,
        entries: Sequence[PendingRequest[RequestT, AnswerT]],
        answers: Sequence[AnswerT],
        rows: int,
        started_s: float,
        seconds: float,
    ) -> None:
        self._batches += 1
        self._rows_run += rows
        num_answered = 0
        for entry, answer in zip(entries, answers, strict=True):
            future = entry.future
            if not future.done():
                num_answered += 1
                entry.outcome = "answered"
                future.set_result(BatchedAnswer(answer, started_s - entry.arrived_s, seconds, rows))
        self._outcome_counts["answered"] += num_answered

    def _withdraw(self, entry: PendingRequest[RequestT, AnswerT]) -> None:
        self._outcome_counts["cancelled"] += 1
        if not entry.future.cancelled():
            # It was settled in the very turn in which its caller was cancelled: nobody gets what it was settled with.
            self._outcome_counts[entry.outcome] -= 1
            entry.future.exception()
        with self._slots.lock:
            self._policy.fair_queue.withdraw(entry)

    def _expire(self, entry: PendingRequest[RequestT, AnswerT]) -> None:
        with self._slots.lock:
            queued = self._policy.fair_queue.withdraw(entry)
        where = "in the queue" if queued else "while it was computed"
        self.fail_all([entry], "expired", DeadlineExceeded(f"the deadline passed {where}"))

    def _count_rejection(self, refusal: QueueFull | DeadlineExceeded) -> None:
        if isinstance(refusal, QueueFull):
            self._refused_full += 1
        else:
            self._refused_late += 1

    # What follows runs in a forward's thread.

    def compute(
        self, batch: ScheduledBatch[PendingRequest[RequestT, AnswerT]], begins: Callable[[float], None]
    ) -> list[tuple[int, float]]:
        """Answer the requests of a batch, in halves where it fails; (rows, seconds) of each forward that succeeded.

        begins: told when each forward begins
        """
        clock, tell = self._slots.clock, self._slots.loop.call_soon_threadsafe
        succeeded: list[tuple[int, float]] = []
        started_s, parts = batch.started_s, [batch.requests]
        while parts:
            part = parts.pop()
            rows = sum([entry.num_rows for entry in part])
            begins(started_s)
            try:
                answers = self._forward(batch.group, [entry.request for entry in part])
                if len(answers) != len(part):
                    raise InferenceError(500, f"{len(answers)} answers came for {len(part)} requests")
            except BaseException as raised:  # noqa: BLE001 - the thread's top: it belongs to whoever sent the request
                ended_s, error = clock(), _to_future_error(raised)
                if len(part) == 1 or _is_unavailable(error):
                    tell(self.fail_all, part, "failed", error)
                    self._report(batch.group, part, rows, len(part), started_s, ended_s)
                else:
                    logger.warning("a batch of %d requests failed (%r): trying its halves", len(part), error)
                    parts += _split_in_half(part)
            else:
                ended_s = clock()
                tell(self._deliver, part, answers, rows, started_s, ended_s - started_s)
                succeeded.append((rows, ended_s - started_s))
                self._report(batch.group, part, rows, 0, started_s, ended_s)
            started_s = ended_s
        return succeeded

    def _report(
        self,
        group: Hashable,
        part: Sequence[PendingRequest[RequestT, AnswerT]],
        rows: int,
        failed: int,
        started_s: float,
        ended_s: float,
    ) -> None:
        if self._on_batch is not None:
            queued_s = tuple([started_s - entry.arrived_s for entry in part])
            seconds = ended_s - started_s
            self._on_batch(BatchReport(self.name, group, rows, len(part), failed, started_s, seconds, queued_s))


def _split_in_half(part: Sequence[EntryT]) -> list[list[EntryT]]:
    """The second half and the first, without the requests that ended meanwhile."""
    halves = part[len(part) // 2 :], part[: len(part) // 2]
    return [kept for half in halves if (kept := [entry for entry in half if not entry.future.done()])]


def _to_future_error(error: BaseException) -> Exception:
    """SystemExit and its like, which end whoever awaits them, and what no future takes, as an error for a request."""
    is_answer = isinstance(error, Exception) and not isinstance(error, StopIteration)
    return error if is_answer else InferenceError(500, f"the model raised {error!r}")  # type: ignore[return-value]


def _is_unavailable(error: Exception) -> bool:
    """Whether no request of the batch can be at fault, so that halving would only repeat the error."""
    return isinstance(error, InferenceError) and error.status == 503
