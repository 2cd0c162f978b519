"""Batches without a timeout: a free slot takes the queued requests at once and never waits for more.

Owns the threads that run forwards, so the event loop stays free to parse and answer; a batch that is expected to be
short (`short_s`) runs on the loop. `scheduler` selects the next batch. Requests gather while a batch is computed, so
batches grow under load, and an idle endpoint answers a single request without delay. Called by the endpoint's replica,
with a queue for each model, and by a run's gateway. Knows no HTTP, no torch, no Ray and no content of a request.

| capacity         | what blocks               | who unblocks           | close()                                      |
|------------------|---------------------------|------------------------|----------------------------------------------|
| `max_queue_rows` | nothing: a full queue     | a batch that is taken, | queued requests fail with Closed, the batch  |
| and `_bytes` of  | refuses with QueueFull    | a request that is      | in progress is answered, the threads end     |
| each queue       | (429), at once, for the   | cancelled or expires   | (waits up to `timeout_s` for them)           |
|                  | tenant with most rows     |                        |                                              |

Thread rules: one lock guards the schedule and the count of sleeping threads; no thread holds it while computing.
Futures, timers and outcome counts belong to the event loop. Results reach it with one call per batch.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Generic, Unpack

from shoal.batching.queue import (
    AnswerT,
    BatcherCounts,
    BatcherState,
    BatchQueue,
    EventLoop,
    Forward,
    GroupT,
    PendingBatch,
    Prediction,
    RequestT,
)
from shoal.batching.scheduler import Batch, DeadlineExceeded, QueueFull, QueueLimits
from shoal.errors import Closed

__all__ = [
    "Batch",
    "BatchQueue",
    "Batcher",
    "BatcherCounts",
    "DeadlineExceeded",
    "PendingBatch",
    "Prediction",
    "QueueFull",
]


class Batcher(Generic[GroupT, RequestT, AnswerT]):
    """Runs the forwards of one or more queues in `slots` threads.

    on_thread_start: called once in each thread, for thread-local settings
    clock:           measures deadlines
    loop:            runs the callbacks; by default the running event loop

    Construct it on the event loop that will call it. Raises ConfigError for fewer than one slot.
    """

    def __init__(
        self,
        *,
        slots: int = 1,
        on_thread_start: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        loop: EventLoop | None = None,
    ) -> None:
        self._slots: BatcherState[GroupT, RequestT, AnswerT] = BatcherState(
            slots, clock, loop or asyncio.get_running_loop(), self._prepare_batch
        )
        self._is_sound, self._yields = True, loop is None
        self._queues: list[BatchQueue[GroupT, RequestT, AnswerT]] = []
        self._on_thread_start = on_thread_start
        self._closed = False
        self._began_s = [math.inf] * (slots + 1)  # when each slot's current forward began; at last, the event loop's
        self._threads = [
            threading.Thread(target=self._run, args=(slot,), name=f"shoal-forward-{slot}", daemon=True)
            for slot in range(slots)
        ]
        for thread in self._threads:
            thread.start()

    def add_queue(
        self,
        name: str,
        forward: Forward[GroupT, RequestT, AnswerT],
        *,
        on_batch: Callable[[PendingBatch[GroupT, RequestT, AnswerT]], None] | None = None,
        **limits: Unpack[QueueLimits],
    ) -> BatchQueue[GroupT, RequestT, AnswerT]:
        """Add a queue with its own forward. It shares the slots with the other queues until it is closed.

        forward:  takes a batch, whose requests are of one group; returns the outputs for each, in order. When it
                  raises, the batch is halved until the faulty request fails alone. An InferenceError of status 503 is
                  no request's fault and fails the full batch
        on_batch: called with every batch that was computed, where it was, once the answers are on their way; not with
                  one that is computed again in halves
        limits:   see `QueueLimits`

        Raises ConfigError for limits that do not fit together, Closed.
        """
        if self._closed:
            raise Closed("the batcher is closed")
        with self._slots.lock:
            policy = self._slots.scheduler.add_queue(name, **limits)

        def remove(queue: BatchQueue[GroupT, RequestT, AnswerT]) -> None:
            if not self._closed:  # then the final counts remain
                self._queues.remove(queue)  # its forward holds a model's memory

        queue = BatchQueue(self._slots, policy, forward, on_batch, remove)
        self._queues.append(queue)
        return queue

    @property
    def is_alive(self) -> bool:
        """Whether every thread is alive, and no batch on the event loop has ended by an error of the batcher's."""
        return self._is_sound and all(thread.is_alive() for thread in self._threads)

    @property
    def computing_s(self) -> float:
        """How long the current forward has taken, the longest over all slots; 0 when none runs. Callable from any
        thread."""
        return max(0.0, self._slots.clock() - min(self._began_s))

    def counts(self) -> BatcherCounts:
        """The sums over all open queues; after `close`, over those that were open."""
        each = [astuple(queue.counts()) for queue in self._queues]
        return BatcherCounts(*[sum(column) for column in zip(*each, strict=True)])

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the queues and end the threads; see the table above. Idempotent; call it on the event loop."""
        if not self._closed:
            self._closed = True
            for queue in self._queues:
                queue.close()
            for _ in self._threads:
                self._slots.wakeups.put(None)
        ends_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, ends_s - time.monotonic()))

    def _prepare_batch(self) -> None:
        """Wake the thread that was claimed, or compute a short batch here in the next turn of the loop.

        A processor that the ingress shares with this process goes to the ingress first: it may have more requests. Else
        each request wakes this process, displaces the sender of the next one, and is computed alone. A loop that is not
        asyncio's has no ingress: there a learner that computes would get the processor, for milliseconds.
        """
        slots = self._slots
        with slots.lock:
            is_short = slots.scheduler.is_next_short(slots.clock())
        if is_short:
            if self._yields:
                os.sched_yield()
            slots.loop.call_soon(self._start_batch)
        else:
            slots.wakeups.put(None)

    def _start_batch(self) -> None:
        """Compute the waiting batch here if it is still short, else wake the thread that was claimed."""
        slots = self._slots
        with slots.lock:
            now_s = slots.clock()
            is_short = slots.scheduler.is_next_short(now_s)
            batch, late = slots.scheduler.take(now_s) if is_short else (None, [])
            if is_short and batch is None:
                slots.is_waking = False
        for entry in late:
            entry.queue.fail_late(entry)
        if not is_short:
            slots.wakeups.put(None)
        elif batch is not None:
            self._compute_here(batch)

    def _compute_here(self, batch: PendingBatch[GroupT, RequestT, AnswerT]) -> None:
        slots = self._slots
        try:
            forwards = batch.requests[0].queue.compute(
                batch, partial(self._began_s.__setitem__, -1), lambda function, *arguments: function(*arguments)
            )
        except BaseException:
            self._is_sound = False  # like a thread, it does not go on after an error of ours
            raise
        self._began_s[-1] = math.inf
        with slots.lock:
            slots.scheduler.finish_batch(batch, slots.clock(), forwards)
            slots.is_waking = slots.scheduler.has_work  # of what arrived before, beyond this batch
        if slots.is_waking:
            slots.loop.call_soon(self._start_batch)

    # What follows runs in the forwards' threads.

    def _run(self, slot: int) -> None:
        if self._on_thread_start is not None:
            self._on_thread_start()
        slots, begins = self._slots, partial(self._began_s.__setitem__, slot)
        batch: PendingBatch[GroupT, RequestT, AnswerT] | None = None
        forwards: list[tuple[int, float]] = []
        slept = False
        try:
            while True:
                with slots.lock:
                    now_s = slots.clock()
                    if slept:
                        slots.num_sleeping -= 1
                        slots.is_waking = slept = False
                    if batch is not None:
                        slots.scheduler.finish_batch(batch, now_s, forwards)
                    is_short = slots.scheduler.is_next_short(now_s)
                    batch, late = (None, []) if is_short else slots.scheduler.take(now_s)
                    if batch is None:
                        slots.num_sleeping += 1  # set under the lock: a later request wakes a thread
                        slept = True
                        if is_short and slots.claim_wakeup():
                            slots.loop.call_soon_threadsafe(self._start_batch)
                    elif slots.num_sleeping and slots.scheduler.has_work and slots.claim_wakeup():
                        slots.wakeups.put(None)
                for entry in late:
                    slots.loop.call_soon_threadsafe(entry.queue.fail_late, entry)
                if batch is not None:
                    forwards = batch.requests[0].queue.compute(batch, begins, slots.loop.call_soon_threadsafe)
                    self._began_s[slot] = math.inf
                elif self._closed:
                    return
                else:
                    slots.wakeups.get()
        except RuntimeError:
            if not slots.loop.is_closed():
                raise  # else the loop is gone, and every caller with it
