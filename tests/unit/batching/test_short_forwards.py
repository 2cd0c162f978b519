"""A batch that is expected to be short is computed on the event loop; whichever computes, no request is lost."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

from gated_forward import Request, answer, requests_of, run, until
from shoal.batching.batcher import Batch, Batcher, BatchQueue

SHORT_S = 0.001


class TimedForward:
    """Takes `seconds` by a clock of its own. Records the thread and the requests of each batch."""

    def __init__(self) -> None:
        self.now_s, self.seconds = 0.0, SHORT_S / 2
        self.threads: list[threading.Thread] = []
        self.batches: list[list[int]] = []

    def clock(self) -> float:
        return self.now_s

    def __call__(self, batch: Batch[Any]) -> Sequence[int]:
        requests: list[Request] = requests_of(batch)
        self.threads.append(threading.current_thread())
        self.batches.append([request.number for request in requests])
        self.now_s += self.seconds
        if any(request.poisonous for request in requests):
            raise ValueError("poison")
        return [request.number * 10 for request in requests]


def run_with(body: Callable[..., Any], *, with_batcher: bool = False) -> None:
    async def bounded() -> None:
        forward = TimedForward()
        batcher: Batcher[Any, Any, Any] = Batcher(clock=forward.clock)
        queue = batcher.add_queue("model", forward, max_batch_rows=4, max_queue_rows=64, short_s=SHORT_S)
        queue.seed_latency_model([(1, forward.seconds), (4, forward.seconds)])
        await (body(forward, queue, batcher) if with_batcher else body(forward, queue))
        batcher.close()
        assert not batcher.is_alive

    run(bounded)


def test_what_has_arrived_is_computed_together_on_the_loop() -> None:
    async def body(forward: TimedForward, queue: BatchQueue[Any, Any, Any]) -> None:
        assert await asyncio.gather(*[answer(queue, Request(number)) for number in range(10)]) == [*range(0, 100, 10)]
        assert forward.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert set(forward.threads) == {threading.main_thread()}
        assert queue.counts().answered == 10

    run_with(body)


def test_other_work_has_its_turn_between_two_batches() -> None:
    async def body(forward: TimedForward, queue: BatchQueue[Any, Any, Any]) -> None:
        tasks = [asyncio.create_task(answer(queue, Request(number))) for number in range(12)]
        seen: list[int] = []
        while not all(task.done() for task in tasks):
            seen.append(len(forward.batches))
            await asyncio.sleep(0)
        assert {1, 2} <= set(seen)

    run_with(body)


def test_a_poisonous_request_fails_alone_on_the_loop_too() -> None:
    async def body(forward: TimedForward, queue: BatchQueue[Any, Any, Any]) -> None:
        asked = [answer(queue, Request(number, poisonous=number == 2)) for number in range(4)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [result for result in results if isinstance(result, int)] == [0, 10, 30]
        assert isinstance(results[2], ValueError)
        counts = queue.counts()
        assert (counts.answered, counts.failed) == (3, 1)

    run_with(body)


def test_a_thread_leaves_short_batches_behind_a_long_one_to_the_loop() -> None:
    """Under load no slot is ever free, and the thread would go on with batches that it need not be woken for."""

    async def body(forward: TimedForward, queue: BatchQueue[Any, Any, Any], batcher: Batcher[Any, Any, Any]) -> None:
        entered, gate = threading.Event(), threading.Event()

        def compute_slowly(batch: Batch[Any]) -> Sequence[int]:
            entered.set()
            assert gate.wait(60.0)
            return [0] * len(batch.requests)

        other = batcher.add_queue("slow", compute_slowly, max_batch_rows=4, max_queue_rows=64)
        first = asyncio.create_task(answer(other, Request(0)))
        await until(entered.is_set)
        tasks = [asyncio.create_task(answer(queue, Request(number))) for number in range(3)]
        await until(lambda: queue.queued_requests == 3)
        gate.set()
        assert await asyncio.gather(first, *tasks) == [0, 0, 10, 20]
        assert forward.threads == [threading.main_thread()]

    run_with(body, with_batcher=True)


def test_no_request_is_left_behind() -> None:
    """The forward is at times slow: batches go to the thread and come back."""

    async def body(forward: TimedForward, queue: BatchQueue[Any, Any, Any]) -> None:
        for number in range(300):
            forward.seconds = 1.0 if number // 20 % 2 else SHORT_S / 10
            burst = [answer(queue, Request(each)) for each in range(1 + number % 11)]
            assert await asyncio.gather(*burst) == [each * 10 for each in range(1 + number % 11)]
        assert len(set(forward.threads)) == 2

    run_with(body)


def test_after_a_long_batch_the_queues_batches_go_to_the_thread() -> None:
    """The estimate is a quantile, which a tenth of the requests does not move: each of them would block the loop."""

    async def body(forward: TimedForward, queue: BatchQueue[Any, Any, Any]) -> None:
        await answer(queue, Request(0))
        forward.seconds = 0.3
        await answer(queue, Request(1))
        forward.seconds, forward.threads = SHORT_S / 10, []
        for number in range(20):
            await answer(queue, Request(number))
        assert threading.main_thread() not in forward.threads
        await until(lambda: queue._slots.num_sleeping == 1)  # else it takes the next batch by an earlier clock
        forward.now_s, forward.threads = forward.now_s + 1000.0, []
        await answer(queue, Request(0))
        assert forward.threads == [threading.main_thread()]

    run_with(body)


def test_a_batcher_that_fails_on_the_loop_is_not_alive() -> None:
    async def body(forward: TimedForward, queue: BatchQueue[Any, Any, Any], batcher: Batcher[Any, Any, Any]) -> None:
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        queue._on_batch = lambda batch: 1 / 0  # type: ignore[assignment]
        assert await answer(queue, Request(1)) == 10
        await until(lambda: bool(errors))
        assert not batcher.is_alive

    run_with(body, with_batcher=True)


def test_a_forward_that_hangs_on_the_loop_is_seen_by_another_thread() -> None:
    async def body(forward: TimedForward, queue: BatchQueue[Any, Any, Any], batcher: Batcher[Any, Any, Any]) -> None:
        seen: list[float] = []

        def look(batch: Batch[Any]) -> Sequence[int]:
            forward.now_s += 7.0
            looking = threading.Thread(target=lambda: seen.append(batcher.computing_s * batcher.is_alive))
            looking.start()
            looking.join()
            return [0] * len(batch.requests)

        other = batcher.add_queue("other", look, max_batch_rows=4, max_queue_rows=64, short_s=SHORT_S)
        other.seed_latency_model([(1, SHORT_S / 2)])
        await answer(other, Request(0))
        assert seen == [7.0]
        assert batcher.computing_s == 0.0

    run_with(body, with_batcher=True)
