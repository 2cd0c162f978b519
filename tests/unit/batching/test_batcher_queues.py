"""Several queues, groups and slots in one batcher, and how a failing batch is taken apart."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any

import pytest

from gated_forward import (
    DEADLINE_S,
    GatedForward,
    Queue,
    Request,
    answer,
    occupy,
    opened,
    requests_of,
    run,
    until,
    with_queue,
)
from shoal.batching.batcher import Batch, Batcher, QueueFull
from shoal.errors import Closed


async def test_only_one_group_is_in_a_batch_and_the_forward_hears_which() -> None:
    seen: list[tuple[Hashable, list[int]]] = []
    forward = GatedForward()

    def grouped(batch: Batch[Any]) -> list[int]:
        requests: list[Request] = requests_of(batch)
        seen.append((batch.requests[0].group, [request.number for request in requests]))
        return forward(batch)

    batcher = Batcher()
    queue = batcher.add_queue("model", grouped, max_batch_rows=8, max_queue_rows=8)
    first = await occupy(forward, queue)
    tasks = [asyncio.create_task(answer(queue, Request(n), group=("v", n % 2))) for n in range(1, 7)]
    await until(lambda: queue.queued_rows == 6)
    forward.open()
    assert await asyncio.gather(first, *tasks) == [n * 10 for n in range(7)]
    assert seen == [(None, [0]), (("v", 1), [1, 3, 5]), (("v", 0), [2, 4, 6])]
    batcher.close()


async def test_each_queue_has_its_own_forward_and_counts_and_closes_alone() -> None:
    batcher = Batcher()
    forward = GatedForward()
    left = batcher.add_queue("left", forward, max_batch_rows=4, max_queue_rows=4)
    right = batcher.add_queue(
        "right",
        lambda batch: [-request.number for request in requests_of(batch)],
        max_batch_rows=4,
        max_queue_rows=4,
    )
    in_hand = asyncio.create_task(answer(left, Request(1)))
    await forward.wait_entered()
    queued = asyncio.create_task(answer(left, Request(2)))
    other = asyncio.create_task(answer(right, Request(3)))
    await until(lambda: left.queued_rows == right.queued_rows == 1)
    left.close()
    left.close()
    with pytest.raises(Closed):
        await queued
    forward.open()
    assert await in_hand == 10
    assert await other == -3
    with pytest.raises(Closed):
        await answer(left, Request(4))
    assert (left.counts().answered, left.counts().failed, right.counts().answered) == (1, 1, 1)
    again = batcher.add_queue("left", opened(), max_batch_rows=4, max_queue_rows=4)
    assert await answer(again, Request(5)) == 50
    assert batcher.counts().answered == 2  # of the queues that are open
    batcher.close()
    with pytest.raises(Closed):
        batcher.add_queue("late", opened(), max_batch_rows=4, max_queue_rows=4)


async def test_two_slots_compute_at_the_same_time_and_wake_each_other() -> None:
    together = threading.Barrier(2)

    def forward(batch: Batch[Any]) -> list[int]:
        requests: list[int] = requests_of(batch)
        together.wait(DEADLINE_S)
        return list(requests)

    batcher: Batcher[Any, int, int] = Batcher(slots=2)
    queue = batcher.add_queue("model", forward, max_batch_rows=1, max_queue_rows=8)
    for _ in range(50):
        assert [await task for task in [asyncio.create_task(answer(queue, n)) for n in range(4)]] == [0, 1, 2, 3]
    batcher.close()
    assert not batcher.is_alive


@with_queue(max_batch_rows=4, max_queue_rows=4)
async def test_who_has_to_leave_a_full_queue_for_another_tenant_is_told_when_to_come_back(
    forward: GatedForward, queue: Queue
) -> None:
    in_hand = await occupy(forward, queue)
    flood = [asyncio.create_task(answer(queue, Request(n), tenant="x")) for n in range(1, 5)]
    await until(lambda: queue.queued_rows == 4)
    other = asyncio.create_task(answer(queue, Request(5), tenant="y"))
    with pytest.raises(QueueFull) as caught:
        await flood[-1]
    assert caught.value.retry_after_s is not None
    with pytest.raises(QueueFull):
        await answer(queue, Request(6), tenant="x")
    last = asyncio.create_task(answer(queue, Request(7), tenant="y"))
    await asyncio.sleep(0)
    flood[2].cancel()  # in the turn in which it has to leave
    forward.open()
    assert await asyncio.gather(in_hand, other, last, *flood[:2]) == [0, 50, 70, 10, 20]
    counts = queue.counts()
    assert counts.submitted == 7
    assert (counts.answered, counts.evicted, counts.cancelled, counts.refused_full) == (5, 1, 1, 1)


async def test_one_poisonous_request_costs_a_few_halves_not_everybody() -> None:
    forward = GatedForward()
    reports: list[Batch[Any]] = []
    batcher = Batcher()
    queue = batcher.add_queue("m", forward, max_batch_rows=32, max_queue_rows=32, on_batch=reports.append)
    first = await occupy(forward, queue)
    tasks = [asyncio.create_task(answer(queue, Request(n, poisonous=n == 9))) for n in range(1, 33)]
    await until(lambda: queue.queued_rows == 32)
    forward.open()
    results = await asyncio.gather(first, *tasks, return_exceptions=True)
    assert [n for n, result in enumerate(results) if result != n * 10] == [9]
    assert str(results[9]) == "poison among [9]"
    assert len(forward.batches) == 1 + 1 + 2 * 5  # the first, the whole, and two halves on each of five levels
    await until(lambda: sum(len(report.requests) for report in reports) == 33)
    assert [report.failed for report in reports if report.failed] == [1]
    assert queue.latency.list_points()[-1][0] <= 16  # only forwards that succeeded teach
    assert await answer(queue, Request(33)) == 330  # and it lives on
    batcher.close()


def test_each_half_has_its_own_time_to_be_taken_for_hung() -> None:
    now_s, seen_s = [0.0], list[float]()

    def forward(batch: Batch[Any]) -> list[int]:
        now_s[0] += 30.0
        seen_s.append(batcher.computing_s)
        raise ValueError("every one is poison")

    async def body() -> None:
        nonlocal batcher
        batcher = Batcher(clock=lambda: now_s[0])
        queue = batcher.add_queue("m", forward, max_batch_rows=4, max_queue_rows=64)
        answers = await asyncio.gather(*[answer(queue, number) for number in range(16)], return_exceptions=True)
        assert [str(each) for each in answers] == ["every one is poison"] * 16
        batcher.close()

    batcher: Batcher[Any, int, int]
    run(body)
    assert seen_s == [30.0] * len(seen_s)


@with_queue(max_batch_rows=4, max_queue_rows=4)
async def test_halves_leave_out_who_was_cancelled_meanwhile(forward: GatedForward, queue: Queue) -> None:
    first = await occupy(forward, queue)
    tasks = [asyncio.create_task(answer(queue, Request(n, poisonous=n == 1))) for n in range(1, 5)]
    await until(lambda: queue.queued_rows == 4)
    forward.release()
    await forward.wait_entered()
    tasks[3].cancel()
    await until(tasks[3].done)
    forward.open()
    await asyncio.gather(first, *tasks, return_exceptions=True)
    assert forward.batches == [[0], [1, 2, 3, 4], [1, 2], [1], [2], [3]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_thread_that_dies_is_noticed() -> None:
    def fails() -> None:
        raise RuntimeError("no such device")

    batcher = Batcher(on_thread_start=fails)
    await until(lambda: not batcher.is_alive)
    batcher.close()


# -- a batch that is expected to be short is computed on the event loop; whichever computes, no request is lost

SHORT_S = 0.001


class TimedForward:
    """Takes `seconds` by a clock of its own. Records the thread and the requests of each batch."""

    def __init__(self) -> None:
        self.now_s, self.seconds = 0.0, SHORT_S / 2
        self.batcher: Batcher[Any, Any, Any] = Batcher(clock=lambda: self.now_s)
        self.threads: list[threading.Thread] = []
        self.batches: list[list[int]] = []

    def __call__(self, batch: Batch[Any]) -> Sequence[int]:
        requests: list[Request] = requests_of(batch)
        self.threads.append(threading.current_thread())
        self.batches.append([request.number for request in requests])
        self.now_s += self.seconds
        if any(request.poisonous for request in requests):
            raise ValueError("poison")
        return [request.number * 10 for request in requests]


def timed(test: Callable[[TimedForward, Queue], Awaitable[None]]) -> Callable[[], None]:
    """Makes a test of a coroutine that takes such a forward and its queue. Their batcher is closed behind it."""

    async def body() -> None:
        forward = TimedForward()
        queue = forward.batcher.add_queue("model", forward, max_batch_rows=4, max_queue_rows=64, short_s=SHORT_S)
        queue.seed_latency_model([(1, forward.seconds), (4, forward.seconds)])
        await test(forward, queue)
        forward.batcher.close()
        assert not forward.batcher.is_alive

    return lambda: run(body)


@timed
async def test_what_has_arrived_is_computed_together_on_the_loop(forward: TimedForward, queue: Queue) -> None:
    assert await asyncio.gather(*[answer(queue, Request(number)) for number in range(10)]) == [*range(0, 100, 10)]
    assert forward.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert set(forward.threads) == {threading.main_thread()}
    assert queue.counts().answered == 10


@timed
async def test_other_work_has_its_turn_between_two_batches(forward: TimedForward, queue: Queue) -> None:
    tasks = [asyncio.create_task(answer(queue, Request(number))) for number in range(12)]
    seen: list[int] = []
    while not all(task.done() for task in tasks):
        seen.append(len(forward.batches))
        await asyncio.sleep(0)
    assert {1, 2} <= set(seen)


@timed
async def test_a_poisonous_request_fails_alone_on_the_loop_too(forward: TimedForward, queue: Queue) -> None:
    asked = [answer(queue, Request(number, poisonous=number == 2)) for number in range(4)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [result for result in results if isinstance(result, int)] == [0, 10, 30]
    assert isinstance(results[2], ValueError)
    counts = queue.counts()
    assert (counts.answered, counts.failed) == (3, 1)


@timed
async def test_a_thread_leaves_short_batches_behind_a_long_one_to_the_loop(forward: TimedForward, queue: Queue) -> None:
    """Under load no slot is ever free, and the thread would go on with batches that it need not be woken for."""
    entered, gate = threading.Event(), threading.Event()

    def compute_slowly(batch: Batch[Any]) -> Sequence[int]:
        entered.set()
        assert gate.wait(60.0)
        return [0] * len(batch.requests)

    other = forward.batcher.add_queue("slow", compute_slowly, max_batch_rows=4, max_queue_rows=64)
    first = asyncio.create_task(answer(other, Request(0)))
    await until(entered.is_set)
    tasks = [asyncio.create_task(answer(queue, Request(number))) for number in range(3)]
    await until(lambda: queue.queued_requests == 3)
    gate.set()
    assert await asyncio.gather(first, *tasks) == [0, 0, 10, 20]
    assert forward.threads == [threading.main_thread()]


@timed
async def test_no_request_is_left_behind(forward: TimedForward, queue: Queue) -> None:
    """The forward is at times slow: batches go to the thread and come back."""
    for number in range(300):
        forward.seconds = 1.0 if number // 20 % 2 else SHORT_S / 10
        burst = [answer(queue, Request(each)) for each in range(1 + number % 11)]
        assert await asyncio.gather(*burst) == [each * 10 for each in range(1 + number % 11)]
    assert len(set(forward.threads)) == 2


@timed
async def test_after_a_long_batch_the_queues_batches_go_to_the_thread(forward: TimedForward, queue: Queue) -> None:
    """The estimate is a quantile, which a tenth of the requests does not move: each of them would block the loop."""
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


@timed
async def test_a_batcher_that_fails_on_the_loop_is_not_alive(forward: TimedForward, queue: Queue) -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    queue._on_batch = lambda batch: 1 / 0  # type: ignore[assignment]
    assert await answer(queue, Request(1)) == 10
    await until(lambda: bool(errors))
    assert not forward.batcher.is_alive


@timed
async def test_a_forward_that_hangs_on_the_loop_is_seen_by_another_thread(forward: TimedForward, queue: Queue) -> None:
    seen: list[float] = []

    def look(batch: Batch[Any]) -> Sequence[int]:
        forward.now_s += 7.0
        looking = threading.Thread(target=lambda: seen.append(forward.batcher.computing_s * forward.batcher.is_alive))
        looking.start()
        looking.join()
        return [0] * len(batch.requests)

    other = forward.batcher.add_queue("other", look, max_batch_rows=4, max_queue_rows=64, short_s=SHORT_S)
    other.seed_latency_model([(1, SHORT_S / 2)])
    await answer(other, Request(0))
    assert seen == [7.0]
    assert forward.batcher.computing_s == 0.0
