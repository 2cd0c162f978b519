"""A forward that computes only when it is let, and what tests of the batcher need around it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shoal.batching.batcher import Batch, Batcher, BatchQueue

DEADLINE_S = 60.0
T = TypeVar("T")
Queue = BatchQueue[Any, Any, Any]


@dataclass
class Request:
    number: int
    num_rows: int = 1
    poisonous: bool = False


@dataclass
class GatedForward:
    """Computes only when let: `release()` lets one batch pass, `open()` all. Records what it was given."""

    max_rows_seen: int = 0
    batches: list[list[int]] = field(default_factory=list)
    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_open: bool = False

    def __call__(self, batch: Batch[Any]) -> list[int]:
        requests: list[Request] = requests_of(batch)
        self.batches.append([request.number for request in requests])
        self.max_rows_seen = max(self.max_rows_seen, sum(request.num_rows for request in requests))
        self.entered.release()
        if not self.is_open:
            assert self.gate.acquire(timeout=DEADLINE_S)
        if any(request.poisonous for request in requests):
            raise ValueError(f"poison among {[request.number for request in requests]}")
        return [request.number * 10 for request in requests]

    def release(self) -> None:
        self.gate.release()

    def open(self) -> None:
        self.is_open = True
        self.gate.release(10_000)

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=DEADLINE_S)


def requests_of(batch: Batch[Any]) -> list[Any]:
    return [entry.request for entry in batch.requests]


def opened() -> GatedForward:
    forward = GatedForward()
    forward.open()
    return forward


def run(body: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(body(), 4 * DEADLINE_S)

    return asyncio.run(bounded())


def with_queue(max_batch_rows: int, max_queue_rows: int) -> Callable[..., Callable[[], None]]:
    """Makes a test of a coroutine that takes a forward and its queue. Their batcher is closed behind it."""

    def wrap(test: Callable[[GatedForward, Queue], Awaitable[None]]) -> Callable[[], None]:
        async def body() -> None:
            forward, batcher = GatedForward(), Batcher[Any, Any, Any]()
            queue = batcher.add_queue("model", forward, max_batch_rows=max_batch_rows, max_queue_rows=max_queue_rows)
            await test(forward, queue)
            batcher.close()

        return lambda: run(body)

    return wrap


async def answer(queue: BatchQueue[Any, Any, Any], request: object, num_rows: int = 1, **words: Any) -> Any:
    return (await queue.submit(request, num_rows, **{"group": None, **words})).outputs


async def occupy(forward: GatedForward, queue: Queue) -> asyncio.Task[Any]:
    """Request 0, which is being computed."""
    asked = asyncio.create_task(answer(queue, Request(0)))
    await forward.wait_entered()
    return asked


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0)
