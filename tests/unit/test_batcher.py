"""The batcher's promises: nothing is lost, nothing idles beside work, limits hold, and poison fails alone."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import Closed, ConfigError, InferenceError
from shoal.serve.batcher import Batcher, BatchQueue, QueueFull

DEADLINE_S = 5.0
T = TypeVar("T")


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

    def __call__(self, group: Hashable, requests: Sequence[Request]) -> list[int]:
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


def opened() -> GatedForward:
    forward = GatedForward()
    forward.open()
    return forward


def run(body: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(body(), 4 * DEADLINE_S)

    return asyncio.run(bounded())


async def answer(queue: BatchQueue[Any, Any], request: object, num_rows: int = 1, **words: Any) -> Any:
    return (await queue.submit(request, num_rows, **words)).answer


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0)


def test_one_request_is_answered_off_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    def forward(group: Hashable, requests: Sequence[int]) -> list[int]:
        threads.append(threading.current_thread())
        return [number + 1 for number in requests]

    async def body() -> None:
        batcher = Batcher()
        queue = batcher.add_queue("model", forward, max_batch_rows=4, max_queue_rows=8)
        assert await answer(queue, 41) == 42
        batcher.close()
        assert threads != [threading.current_thread()]
        assert not batcher.alive

    run(body)


def test_a_free_slot_takes_everything_that_is_queued() -> None:
    async def body() -> None:
        forward = GatedForward()
        batcher = Batcher()
        queue = batcher.add_queue("model", forward, max_batch_rows=64, max_queue_rows=64)
        first = asyncio.create_task(answer(queue, Request(0)))
        await forward.wait_entered()
        others = [asyncio.create_task(answer(queue, Request(number))) for number in range(1, 11)]
        await until(lambda: queue.queued_rows == 10)
        forward.open()
        assert await asyncio.gather(first, *others) == [number * 10 for number in range(11)]
        assert forward.batches == [[0], list(range(1, 11))]
        batcher.close()

    run(body)


def test_a_request_is_never_split_and_order_is_kept() -> None:
    async def body() -> None:
        forward = GatedForward()
        batcher = Batcher()
        queue = batcher.add_queue("model", forward, max_batch_rows=4, max_queue_rows=64)
        sizes = [1, 3, 2, 4, 1, 1]
        tasks = []
        for number, size in enumerate(sizes):
            tasks.append(asyncio.create_task(answer(queue, Request(number, size), size)))
            if number == 0:
                await forward.wait_entered()
        await until(lambda: queue.queued_rows == sum(sizes[1:]))
        forward.open()
        await asyncio.gather(*tasks)
        assert forward.batches == [[0], [1], [2], [3], [4, 5]]
        batcher.close()

    run(body)


def test_a_poisonous_request_fails_alone() -> None:
    async def body() -> None:
        forward = GatedForward()
        batcher = Batcher()
        queue = batcher.add_queue("model", forward, max_batch_rows=8, max_queue_rows=64)
        blocker = asyncio.create_task(answer(queue, Request(0)))
        await forward.wait_entered()
        tasks = [asyncio.create_task(answer(queue, Request(n, poisonous=n == 3))) for n in range(1, 6)]
        await until(lambda: queue.queued_rows == 5)
        forward.open()
        answers = await asyncio.gather(blocker, *tasks, return_exceptions=True)
        assert [answer for answer in answers if not isinstance(answer, Exception)] == [0, 10, 20, 40, 50]
        assert str(answers[3]) == "poison among [3]"
        assert queue.counts().failed == 1
        assert await answer(queue, Request(6)) == 60  # and it lives on
        batcher.close()

    run(body)


def test_wrong_number_of_answers_is_an_error_of_the_model() -> None:
    async def body() -> None:
        batcher: Batcher[int, int] = Batcher()
        queue = batcher.add_queue("model", lambda group, requests: [], max_batch_rows=4, max_queue_rows=8)
        with pytest.raises(InferenceError, match="0 answers came for 1") as caught:
            await answer(queue, 1)
        assert caught.value.status == 500
        batcher.close()

    run(body)


def test_a_cancelled_request_leaves_the_queue_and_makes_room() -> None:
    async def body() -> None:
        forward = GatedForward()
        batcher = Batcher()
        queue = batcher.add_queue("model", forward, max_batch_rows=2, max_queue_rows=2)
        blocker = asyncio.create_task(answer(queue, Request(0)))
        await forward.wait_entered()
        doomed = asyncio.create_task(answer(queue, Request(1, 2), 2))
        await until(lambda: queue.queued_rows == 2)
        with pytest.raises(QueueFull) as refused:
            await answer(queue, Request(2))
        assert refused.value.status == 429
        doomed.cancel()
        await until(doomed.done)
        assert queue.queued_rows == 0
        successor = asyncio.create_task(answer(queue, Request(3)))
        forward.open()
        assert await asyncio.gather(blocker, successor) == [0, 30]
        assert [1] not in forward.batches
        assert queue.counts().cancelled == 1
        batcher.close()

    run(body)


def test_a_request_cancelled_while_it_is_computed_disturbs_nobody() -> None:
    async def body() -> None:
        forward = GatedForward()
        batcher = Batcher()
        queue = batcher.add_queue("model", forward, max_batch_rows=2, max_queue_rows=2)
        doomed = asyncio.create_task(answer(queue, Request(0)))
        await forward.wait_entered()
        doomed.cancel()
        await until(doomed.done)
        forward.open()
        assert await answer(queue, Request(1)) == 10
        counts = queue.counts()
        assert (counts.submitted, counts.answered, counts.cancelled) == (2, 1, 1)
        batcher.close()

    run(body)


def test_close_fails_what_is_queued_answers_what_is_in_hand_and_is_idempotent() -> None:
    async def body() -> None:
        forward = GatedForward()
        batcher = Batcher()
        queue = batcher.add_queue("model", forward, max_batch_rows=2, max_queue_rows=4)
        in_hand = asyncio.create_task(answer(queue, Request(0)))
        await forward.wait_entered()
        queued = asyncio.create_task(answer(queue, Request(1)))
        await until(lambda: queue.queued_rows == 1)
        forward.open()
        batcher.close()
        batcher.close()
        assert await in_hand == 0
        with pytest.raises(Closed):
            await queued
        with pytest.raises(Closed):
            await answer(queue, Request(2))
        assert not batcher.alive

    run(body)


def test_close_does_not_wait_longer_than_it_is_told() -> None:
    async def body() -> None:
        forward = GatedForward()
        batcher = Batcher()
        queue = batcher.add_queue("model", forward, max_batch_rows=2, max_queue_rows=4)
        in_hand = asyncio.create_task(answer(queue, Request(0)))
        await forward.wait_entered()
        batcher.close(timeout_s=0.01)
        assert batcher.alive
        forward.open()
        assert await in_hand == 0
        batcher.close()
        assert not batcher.alive

    run(body)


@pytest.mark.parametrize("num_rows", [0, 5])
def test_a_request_that_no_batch_can_hold_is_refused(num_rows: int) -> None:
    async def body() -> None:
        batcher = Batcher()
        queue = batcher.add_queue("model", opened(), max_batch_rows=4, max_queue_rows=8)
        with pytest.raises(InferenceError, match=f"1 to 4 rows, this one has {num_rows}") as caught:
            await answer(queue, Request(0, num_rows), num_rows)
        assert caught.value.status == 422
        batcher.close()

    run(body)


@pytest.mark.parametrize(("batch", "rows", "field_name"), [(0, 8, "max_batch_rows"), (8, 4, "max_queue_rows")])
def test_limits_that_do_not_fit_are_refused(batch: int, rows: int, field_name: str) -> None:
    async def body() -> None:
        with pytest.raises(ConfigError) as caught:
            Batcher().add_queue("model", opened(), max_batch_rows=batch, max_queue_rows=rows)
        assert caught.value.field == field_name

    run(body)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 4), st.booleans()),
        st.tuples(st.just("cancel"), st.integers(0, 60), st.just(False)),
        st.tuples(st.just("release"), st.just(0), st.just(False)),
        st.tuples(st.just("turn"), st.just(0), st.just(False)),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(steps=steps, close_early=st.booleans())
def test_every_request_ends_exactly_once(steps: list[tuple[str, int, bool]], close_early: bool) -> None:
    """In = answered + failed + cancelled, whatever is submitted, cancelled, poisoned and closed in whichever order."""

    async def body() -> None:
        forward = GatedForward()
        batcher = Batcher()
        queue = batcher.add_queue("model", forward, max_batch_rows=4, max_queue_rows=12)
        tasks: list[asyncio.Task[int]] = []
        for kind, number, poisonous in steps:
            if kind == "submit":
                request = Request(len(tasks), number, poisonous)
                tasks.append(asyncio.create_task(answer(queue, request, number)))
            elif kind == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            elif kind == "release":
                forward.release()
            await asyncio.sleep(0)
            assert 0 <= queue.queued_rows <= 12
        if close_early:
            forward.open()
            batcher.close()
        forward.open()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = sum(isinstance(result, QueueFull) for result in results)
        unborn = sum(isinstance(r, asyncio.CancelledError) for r in results) - queue.counts().cancelled
        late = len(tasks) - refused - unborn - queue.counts().submitted  # submitted after close()
        assert late == 0
        counts = queue.counts()
        assert counts.submitted == counts.answered + counts.failed + counts.cancelled
        assert counts.answered == sum(isinstance(result, int) for result in results)
        assert all(result == number * 10 for number, result in enumerate(results) if isinstance(result, int))
        assert counts.queued_rows == 0
        assert forward.max_rows_seen <= 4
        batcher.close()

    run(body)


@pytest.mark.parametrize("poisonous", [False, True])
def test_a_request_cancelled_in_the_turn_of_its_answer_counts_once(poisonous: bool) -> None:
    async def body() -> None:
        batcher = Batcher()
        queue = batcher.add_queue("model", opened(), max_batch_rows=4, max_queue_rows=12)
        task = asyncio.create_task(answer(queue, Request(1, poisonous=poisonous)))

        def and_cancel(real: Callable[..., None]) -> Callable[..., None]:
            return lambda *words: (real(*words), task.cancel())[0]

        for name in ("_deliver", "settle_all"):
            setattr(queue, name, and_cancel(getattr(queue, name)))
        with pytest.raises(asyncio.CancelledError):
            await task
        counts = queue.counts()
        assert (counts.submitted, counts.answered, counts.failed, counts.cancelled) == (1, 0, 0, 1)
        batcher.close()

    run(body)


def test_a_slot_never_idles_beside_work() -> None:
    """Many rounds of bursts and lone requests: each is answered without any timer that would rescue a lost wakeup."""

    async def body() -> None:
        batcher = Batcher()
        queue = batcher.add_queue("model", opened(), max_batch_rows=8, max_queue_rows=64)
        for round_number in range(400):
            burst = [answer(queue, Request(number)) for number in range(1 + round_number % 7)]
            assert len(await asyncio.gather(*burst)) == len(burst)
        batcher.close()

    run(body)
