"""Batches without a timeout: a free slot takes what is queued, at once, and never waits for more.

Owns one queue and the one thread in which the forward runs, so the event loop stays free to parse and answer. While a
batch is computed the next requests gather; under load batches grow by themselves, and an idle endpoint answers a single
request as fast as it can. Called by the endpoint's replica; knows no HTTP, no torch, no Ray and not what a request is.

| capacity         | what blocks               | who unblocks           | close()                                      |
|------------------|---------------------------|------------------------|----------------------------------------------|
| `max_queue_rows` | nothing: a full queue     | a batch that is taken, | what is queued fails with Closed, the batch  |
|                  | refuses with QueueFull    | a request that is      | in hand is still answered, the thread ends   |
|                  | (429), at once            | cancelled              | (waits up to `timeout_s` for it)             |

Thread rules, which make locks unnecessary: requests are appended and withdrawn by the event loop only, taken by the
thread only; each counter has one writer; results reach the loop with one call per batch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

from shoal.errors import Closed, ConfigError, InferenceError

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


class QueueFull(InferenceError):
    """The queue holds `max_queue_rows` already; the caller may try again later."""

    def __init__(self, max_queue_rows: int) -> None:
        self.max_queue_rows = max_queue_rows
        super().__init__(429, f"the queue is full ({max_queue_rows} rows are waiting); try again later")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.max_queue_rows,))


@dataclass(frozen=True)
class BatcherCounts:
    """What went through a batcher. submitted = answered + failed + cancelled + (still queued or in hand)."""

    submitted: int
    answered: int
    failed: int
    cancelled: int
    batches: int
    rows: int
    queued_rows: int


class _Entry(Generic[RequestT, AnswerT]):
    """One waiting request. Compared by identity."""

    __slots__ = ("future", "num_rows", "request")

    def __init__(self, request: RequestT, num_rows: int, future: asyncio.Future[AnswerT]) -> None:
        self.request, self.num_rows, self.future = request, num_rows, future


class Batcher(Generic[RequestT, AnswerT]):
    """Runs `forward` over whatever is queued, in a thread of its own.

    forward:         gets the requests of a batch, gives one answer for each, in order. When it raises, the requests of
                     the batch are tried one by one, so that a poisonous one fails alone.
    max_batch_rows:  a batch never holds more rows; a request is never split
    max_queue_rows:  rows that may wait; the next request is refused with QueueFull
    on_thread_start: called once in the forward's thread (thread-local settings)

    Must be made on the event loop that will call it. Raises ConfigError for limits that do not fit together.
    """

    def __init__(
        self,
        forward: Callable[[Sequence[RequestT]], Sequence[AnswerT]],
        *,
        max_batch_rows: int,
        max_queue_rows: int,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        if max_batch_rows < 1:
            raise ConfigError("max_batch_rows", max_batch_rows, "a batch holds at least one row")
        if max_queue_rows < max_batch_rows:
            raise ConfigError("max_queue_rows", max_queue_rows, "is below one batch", f"at least {max_batch_rows}")
        self.max_batch_rows, self.max_queue_rows = max_batch_rows, max_queue_rows
        self._forward, self._on_thread_start = forward, on_thread_start
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_Entry[RequestT, AnswerT]] = deque()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._idle = False  # the thread sleeps or is about to
        self._wakeup_scheduled = False
        self._closed = False
        self._submitted = self._answered = self._failed = self._cancelled = 0  # written by the loop
        self._rows_in = self._rows_withdrawn = 0  # written by the loop
        self._rows_taken = self._batches = self._rows_run = 0  # written by the thread
        self._thread = threading.Thread(target=self._run, name="shoal-forward", daemon=True)
        self._thread.start()

    @property
    def queued_rows(self) -> int:
        """Rows that wait for a slot."""
        return self._rows_in - self._rows_withdrawn - self._rows_taken

    @property
    def alive(self) -> bool:
        """Whether the forward's thread is there to answer."""
        return self._thread.is_alive()

    def counts(self) -> BatcherCounts:
        """The counters at this moment; they settle only when nothing is in hand."""
        return BatcherCounts(
            self._submitted, self._answered, self._failed, self._cancelled, self._batches, self._rows_run,
            self.queued_rows,
        )  # fmt: skip

    async def submit(self, request: RequestT, num_rows: int = 1) -> AnswerT:
        """The answer to one request of `num_rows` rows. Cancelling the caller takes the request out of the queue.

        Raises QueueFull (429), InferenceError (422) for more rows than a batch may hold, Closed, or what `forward`
        raised for this request alone.
        """
        if self._closed:
            raise Closed("the batcher is closed")
        if not 1 <= num_rows <= self.max_batch_rows:
            raise InferenceError(422, f"a request holds 1 to {self.max_batch_rows} rows, this one has {num_rows}")
        if self.queued_rows + num_rows > self.max_queue_rows:
            raise QueueFull(self.max_queue_rows)
        entry: _Entry[RequestT, AnswerT] = _Entry(request, num_rows, self._loop.create_future())
        self._submitted += 1
        self._rows_in += num_rows
        self._queue.append(entry)
        if self._idle and not self._wakeup_scheduled:
            # At the end of this turn of the loop, so that what arrived together is computed together.
            self._wakeup_scheduled = True
            self._loop.call_soon(self._wake)
        try:
            return await entry.future
        except asyncio.CancelledError:
            self._withdraw(entry)
            raise

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread; see the table above. Idempotent; call it on the event loop."""
        if not self._closed:
            self._closed = True
            while self._queue:
                try:
                    entry = self._queue.popleft()
                except IndexError:  # the thread was faster
                    break
                self._rows_withdrawn += entry.num_rows
                self._settle(entry, Closed("the batcher was closed before this request was computed"))
            self._wakeups.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # What follows runs on the event loop.

    def _wake(self) -> None:
        self._wakeup_scheduled = False
        self._idle = False
        self._wakeups.put(None)

    def _withdraw(self, entry: _Entry[RequestT, AnswerT]) -> None:
        self._cancelled += 1
        if not entry.future.cancelled():
            # It was settled in the very turn in which its caller was cancelled: nobody gets what it was settled with.
            if entry.future.exception() is None:
                self._answered -= 1
            else:
                self._failed -= 1
            return
        try:
            self._queue.remove(entry)
        except ValueError:
            return  # already taken: its answer will find a cancelled future
        self._rows_withdrawn += entry.num_rows

    def _deliver(self, batch: Sequence[_Entry[RequestT, AnswerT]], answers: Sequence[AnswerT]) -> None:
        for entry, answer in zip(batch, answers, strict=True):
            if not entry.future.done():
                self._answered += 1
                entry.future.set_result(answer)

    def _settle(self, entry: _Entry[RequestT, AnswerT], error: Exception) -> None:
        if not entry.future.done():
            self._failed += 1
            entry.future.set_exception(error)

    # What follows runs in the forward's thread.

    def _run(self) -> None:
        if self._on_thread_start is not None:
            self._on_thread_start()
        while True:
            batch = self._take()
            if batch:
                try:
                    self._compute(batch)
                except RuntimeError:
                    if not self._loop.is_closed():
                        raise
                    return  # the loop is gone, and with it everybody who waited
            elif self._closed:
                return
            else:
                # Idle is announced before the queue is looked at again: a request that comes in between is seen by
                # one of the two sides. A wakeup too many costs one empty turn.
                self._idle = True
                if not self._queue:
                    self._wakeups.get()

    def _take(self) -> list[_Entry[RequestT, AnswerT]]:
        """The longest prefix of the queue that fits a batch, without what was cancelled meanwhile."""
        batch: list[_Entry[RequestT, AnswerT]] = []
        rows, queue = 0, self._queue
        while queue:
            try:
                entry = queue.popleft()
            except IndexError:  # withdrawn by the loop this very moment
                break
            if entry.future.done():
                self._rows_taken += entry.num_rows
                continue
            if rows + entry.num_rows > self.max_batch_rows:
                queue.appendleft(entry)
                break
            self._rows_taken += entry.num_rows
            rows += entry.num_rows
            batch.append(entry)
        return batch

    def _compute(self, batch: list[_Entry[RequestT, AnswerT]]) -> None:
        self._batches += 1
        try:
            answers = self._forward([entry.request for entry in batch])
            if len(answers) != len(batch):
                raise InferenceError(500, f"{len(answers)} answers came for {len(batch)} requests")
        except Exception as error:  # noqa: BLE001 - the thread's top: the error belongs to whoever sent the request
            if len(batch) == 1:
                self._loop.call_soon_threadsafe(self._settle, batch[0], error)
                return
            logger.warning("a batch of %d requests failed (%r): trying them one by one", len(batch), error)
            for entry in batch:
                if not entry.future.done():
                    self._compute([entry])
            return
        self._rows_run += sum([entry.num_rows for entry in batch])
        self._loop.call_soon_threadsafe(self._deliver, batch, answers)
