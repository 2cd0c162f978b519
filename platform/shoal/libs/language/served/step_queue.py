"""An answer that streams: work that is computed in many steps, each of them an entry of a batcher.

An engine that generates, texts say, computes a little of every answer in progress in each `step`. As entries of a
queue, steps share the batcher's thread with the models of a replica by their weights, one that hangs is found as a
forward is, and what it gives reaches the event loop in one call. Decision 082.

| capacity                    | what blocks | who unblocks | close()                                      |
|-----------------------------|-------------|--------------|----------------------------------------------|
| `DEPTH` steps, besides what | nothing     | -            | entries fail with Closed; a step in progress |
| is `run` once               |             |              | ends, and its result is dropped              |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from shoal.extend.serve import Batcher, PendingBatch, Prediction

StepT = TypeVar("StepT")
T = TypeVar("T")
DEPTH = 2  # steps in the queue: the next one begins while the event loop hands out what the last one gave
MAX_ENTRIES = 1024


class StepQueue(Generic[StepT]):
    """Computes `step` again and again while it has work. Call it on the event loop.

    step:     computes in the batcher's thread; None where it had nothing to do
    has_work: whether another step is needed; asked on the event loop
    deliver:  takes what a step gave, on the event loop
    fail:     takes the error of a step, on the event loop
    """

    def __init__(
        self,
        batcher: Batcher[Any, Any, Any],
        name: str,
        weight: float,
        step: Callable[[], StepT | None],
        has_work: Callable[[], bool],
        deliver: Callable[[StepT], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._step = step
        self._has_work = has_work
        self._deliver = deliver
        self._fail = fail
        self._queue = batcher.add_queue(name, _compute, max_batch_rows=1, max_queue_rows=MAX_ENTRIES, weight=weight)
        self._num_queued = 0

    def wake(self) -> None:
        """Let steps be computed, if there is work."""
        while not self._queue.closed and self._num_queued < DEPTH and self._has_work():
            self._num_queued += 1
            self._queue.enqueue(self._step, _StepReply(self._end_step), group=None)

    async def run(self, function: Callable[[], T]) -> T:
        """Compute a function once, among the steps. Raises what it raises, and QueueFull (429), Closed."""
        prediction: Prediction[T] = await self._queue.submit(function, group=None)
        return prediction.outputs

    @property
    def is_closed(self) -> bool:
        return self._queue.closed

    def close(self) -> None:
        """See the module's table. Idempotent."""
        self._queue.close()

    def _end_step(self, given: StepT | None, error: Exception | None) -> None:
        self._num_queued -= 1
        if self._queue.closed:
            return
        if error is not None:
            self._fail(error)
        elif given is not None:
            self._deliver(given)
        self.wake()


class _StepReply:
    """Where the outcome of a step goes: a `ReplyFuture`."""

    def __init__(self, end: Callable[[Any, Exception | None], None]) -> None:
        self._end = end

    def done(self) -> bool:
        return False

    def set_result(self, result: Prediction[Any], /) -> None:
        self._end(result.outputs, None)

    def set_exception(self, error: Exception, /) -> None:
        self._end(None, error)


def _compute(batch: PendingBatch[Any, Any, Any]) -> list[Any]:
    return [entry.request() for entry in batch.requests]
