"""The batcher's promises: nothing is lost, nothing idles beside work, limits hold, and poison fails alone."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gated_forward import GatedForward, Queue, Request, answer, occupy, opened, requests_of, run, until, with_queue
from refusals import refused
from shoal.batching.batcher import Batch, Batcher, DeadlineExceeded, QueueFull
from shoal.batching.queue import MIN_SWEEP_TICKS, TICK_S, DeadlineTimer
from shoal.errors import Closed, InferenceError


async def test_one_request_is_answered_off_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    def forward(batch: Batch[Any]) -> list[int]:
        requests: list[int] = requests_of(batch)
        threads.append(threading.current_thread())
        return [number + 1 for number in requests]

    batcher = Batcher()
    queue = batcher.add_queue("model", forward, max_batch_rows=4, max_queue_rows=8)
    assert await answer(queue, 41) == 42
    batcher.close()
    assert threads != [threading.current_thread()]
    assert not batcher.is_alive


@with_queue(max_batch_rows=64, max_queue_rows=64)
async def test_a_free_slot_takes_everything_that_is_queued(forward: GatedForward, queue: Queue) -> None:
    first = await occupy(forward, queue)
    others = [asyncio.create_task(answer(queue, Request(number))) for number in range(1, 11)]
    await until(lambda: queue.queued_rows == 10)
    forward.open()
    assert await asyncio.gather(first, *others) == [number * 10 for number in range(11)]
    assert forward.batches == [[0], list(range(1, 11))]


@with_queue(max_batch_rows=4, max_queue_rows=64)
async def test_a_request_is_never_split_and_order_is_kept(forward: GatedForward, queue: Queue) -> None:
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


@pytest.mark.parametrize("error", [SystemExit, StopIteration])
async def test_what_no_future_takes_fails_the_request_and_ends_no_thread(error: type[BaseException]) -> None:
    def forward(batch: Batch[Any]) -> list[int]:
        requests: list[int] = requests_of(batch)
        if 3 in requests:
            raise error("enough")
        return list(requests)

    batcher: Batcher[Any, int, int] = Batcher()
    queue = batcher.add_queue("model", forward, max_batch_rows=4, max_queue_rows=8)
    with pytest.raises(InferenceError, match=r"the model raised \w+\('enough'\)"):
        await answer(queue, 3)
    assert await answer(queue, 4) == 4
    assert (queue.counts().submitted, queue.counts().failed, queue.counts().cancelled) == (2, 1, 0)
    assert batcher.is_alive
    batcher.close()


async def test_wrong_number_of_answers_is_an_error_of_the_model_and_of_rows_one_of_the_caller() -> None:
    batcher: Batcher[Any, int, int] = Batcher()
    queue = batcher.add_queue("model", lambda batch: [], max_batch_rows=4, max_queue_rows=8)
    with refused(500, "0 answers came for 1"):
        await answer(queue, 1)
    for num_rows in (0, 5):
        with refused(422, f"1 to 4 rows, this one has {num_rows}"):
            await answer(queue, 1, num_rows)
    batcher.close()


@with_queue(max_batch_rows=2, max_queue_rows=2)
async def test_a_cancelled_request_leaves_the_queue_and_makes_room(forward: GatedForward, queue: Queue) -> None:
    blocker = await occupy(forward, queue)
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


@with_queue(max_batch_rows=2, max_queue_rows=2)
async def test_a_request_cancelled_while_it_is_computed_disturbs_nobody(forward: GatedForward, queue: Queue) -> None:
    doomed = await occupy(forward, queue)
    doomed.cancel()
    await until(doomed.done)
    forward.open()
    assert await answer(queue, Request(1)) == 10
    counts = queue.counts()
    assert (counts.submitted, counts.answered, counts.cancelled) == (2, 1, 1)


async def test_close_fails_what_is_queued_answers_what_is_in_hand_and_is_idempotent() -> None:
    forward = GatedForward()
    batcher = Batcher()
    queue = batcher.add_queue("model", forward, max_batch_rows=2, max_queue_rows=4)
    in_hand = await occupy(forward, queue)
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
    assert not batcher.is_alive


async def test_close_does_not_wait_longer_than_it_is_told() -> None:
    forward = GatedForward()
    batcher = Batcher()
    queue = batcher.add_queue("model", forward, max_batch_rows=2, max_queue_rows=4)
    in_hand = await occupy(forward, queue)
    batcher.close(timeout_s=0.01)
    assert batcher.is_alive
    forward.open()
    assert await in_hand == 0
    batcher.close()
    assert not batcher.is_alive


steps = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 4), st.booleans()),
        st.tuples(st.just("hurry"), st.integers(1, 4), st.booleans()),
        st.tuples(st.just("cancel"), st.integers(0, 60), st.just(False)),
        st.tuples(st.just("release"), st.just(0), st.just(False)),
        st.tuples(st.just("turn"), st.just(0), st.just(False)),
    ),
    max_size=40,
)


@settings(max_examples=30)
@given(steps=steps, close_early=st.booleans())
def test_every_request_ends_exactly_once(steps: list[tuple[str, int, bool]], close_early: bool) -> None:
    """In = answered + failed + cancelled + expired + evicted, whatever comes, is cancelled, poisoned, closed."""

    async def body() -> None:
        forward = GatedForward()
        batcher = Batcher()
        queue = batcher.add_queue("model", forward, max_batch_rows=4, max_queue_rows=12)
        tasks: list[asyncio.Task[int]] = []
        for kind, number, poisonous in steps:
            if kind in ("submit", "hurry"):
                request = Request(len(tasks), number, poisonous)
                deadline_s = time.monotonic() + 0.001 if kind == "hurry" else None
                tasks.append(
                    asyncio.create_task(
                        answer(
                            queue, request, number, group=number % 2, tenant="xy"[number // 3], deadline_s=deadline_s
                        )
                    )
                )
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
        counts = queue.counts()
        unborn = sum(isinstance(result, asyncio.CancelledError) for result in results) - counts.cancelled
        assert len(tasks) == counts.submitted + counts.refused_full + counts.refused_late + unborn
        assert counts.refused_full + counts.evicted == sum(isinstance(result, QueueFull) for result in results)
        assert counts.refused_late + counts.expired == sum(isinstance(result, DeadlineExceeded) for result in results)
        ended = counts.answered + counts.failed + counts.cancelled + counts.expired + counts.evicted
        assert counts.submitted == ended
        assert counts.answered == sum(isinstance(result, int) for result in results)
        assert all(result == number * 10 for number, result in enumerate(results) if isinstance(result, int))
        assert counts.queued_rows == 0
        assert forward.max_rows_seen <= 4
        batcher.close()

    run(body)


@pytest.mark.parametrize("poisonous", [False, True])
async def test_a_request_cancelled_in_the_turn_of_its_answer_counts_once(poisonous: bool) -> None:
    batcher = Batcher()
    queue = batcher.add_queue("model", opened(), max_batch_rows=4, max_queue_rows=12)
    task = asyncio.create_task(answer(queue, Request(1, poisonous=poisonous)))

    def and_cancel(real: Callable[..., None]) -> Callable[..., None]:
        return lambda *words: (real(*words), task.cancel())[0]

    for name in ("_deliver", "fail_all"):
        setattr(queue, name, and_cancel(getattr(queue, name)))
    with pytest.raises(asyncio.CancelledError):
        await task
    counts = queue.counts()
    assert (counts.submitted, counts.answered, counts.failed, counts.cancelled) == (1, 0, 0, 1)
    batcher.close()


async def test_a_slot_never_idles_beside_work() -> None:
    """Many rounds of bursts and lone requests: each is answered without any timer that would rescue a lost wakeup."""

    batcher = Batcher()
    queue = batcher.add_queue("model", opened(), max_batch_rows=8, max_queue_rows=64)
    for round_number in range(400):
        burst = [answer(queue, Request(number)) for number in range(1 + round_number % 7)]
        assert len(await asyncio.gather(*burst)) == len(burst)
    batcher.close()


# -- deadlines in the running batcher: who is refused, who expires where, and that nobody is computed for nothing

SOON_S = 0.02


def soon() -> float:
    return time.monotonic() + SOON_S


@with_queue(max_batch_rows=2, max_queue_rows=2)
async def test_a_request_that_expires_in_the_queue_is_told_so_and_never_computed(
    forward: GatedForward, queue: Queue
) -> None:
    """Though the forward hangs, and nobody else comes."""
    in_hand = await occupy(forward, queue)
    with pytest.raises(DeadlineExceeded, match="in the queue") as caught:
        await answer(queue, Request(1, 2), 2, deadline_s=soon())
    assert caught.value.status == 504
    assert queue.queued_rows == 0
    forward.open()
    assert await in_hand == 0
    assert await answer(queue, Request(2)) == 20
    assert forward.batches == [[0], [2]]
    counts = queue.counts()
    assert (counts.submitted, counts.answered, counts.expired) == (3, 2, 1)


@with_queue(max_batch_rows=2, max_queue_rows=2)
async def test_what_a_queue_is_told_of_its_forwards_refuses_from_the_first_request_on(
    forward: GatedForward, queue: Queue
) -> None:
    queue.seed_latency_model([(1, 30.0), (2, 60.0)])
    first = asyncio.create_task(answer(queue, Request(0), deadline_s=time.monotonic() + 5.0))  # a free slot tries
    await forward.wait_entered()
    with pytest.raises(DeadlineExceeded, match="the answer would come"):
        await answer(queue, Request(1), deadline_s=time.monotonic() + 50.0)
    second = asyncio.create_task(answer(queue, Request(2), deadline_s=time.monotonic() + 70.0))
    await asyncio.sleep(0)
    forward.open()
    assert [await first, await second] == [0, 20]


@with_queue(max_batch_rows=2, max_queue_rows=2)
async def test_a_request_that_expires_while_it_is_computed_is_told_at_its_deadline(
    forward: GatedForward, queue: Queue
) -> None:
    with pytest.raises(DeadlineExceeded, match="while it was computed"):
        await answer(queue, Request(0), deadline_s=soon())
    forward.open()
    assert await answer(queue, Request(1)) == 10
    counts = queue.counts()
    assert (counts.submitted, counts.answered, counts.expired) == (2, 1, 1)


@with_queue(max_batch_rows=2, max_queue_rows=4)
async def test_one_that_is_given_up_in_the_queue_is_told(forward: GatedForward, queue: Queue) -> None:
    """When its batch is put together, the model says that it is too late."""
    in_hand = await occupy(forward, queue)
    doomed = asyncio.create_task(answer(queue, Request(1), deadline_s=time.monotonic() + 30))
    patient = asyncio.create_task(answer(queue, Request(2)))
    await until(lambda: queue.queued_rows == 2)
    for _ in range(3):
        queue.latency.observe(1, 60.0, time.monotonic())
    forward.release()
    with pytest.raises(DeadlineExceeded, match="cannot be met"):
        await doomed
    forward.open()
    assert await asyncio.gather(in_hand, patient) == [0, 20]
    assert forward.batches == [[0], [2]]
    assert queue.counts().expired == 1


async def test_an_answer_before_the_deadline_is_all_that_a_request_hears() -> None:
    now = [100.0]
    batcher = Batcher(clock=lambda: now[0])
    queue = batcher.add_queue("model", opened(), max_batch_rows=2, max_queue_rows=2)
    for number in range(3):
        assert await answer(queue, Request(number), deadline_s=100.2) == number * 10
    now[0] += 3.0
    await asyncio.sleep(0.2 + 3 * TICK_S)  # lets the deadlines pass: nothing may happen then
    counts = queue.counts()
    assert (counts.answered, counts.expired) == (3, 0)
    batcher.close()


async def test_the_clock_of_the_batcher_is_what_times_are_told_by() -> None:
    now = [100.0]
    reports: list[Batch[Any]] = []

    def forward(batch: Batch[Any]) -> list[int]:
        requests: list[int] = requests_of(batch)
        now[0] += 0.5
        return list(requests)

    batcher: Batcher[Any, int, int] = Batcher(clock=lambda: now[0])
    queue = batcher.add_queue("m", forward, max_batch_rows=4, max_queue_rows=8, on_batch=reports.append)
    batched = await queue.submit(7, 3, group="g")
    assert batched == (7, 0, 0.0, 0.5, 3)
    await until(lambda: queue.latency.seconds(3) == 0.5)
    [batch] = reports
    [request] = batch.requests
    assert (batch.queue.name, request.group, request.arrived_s) == ("m", "g", 100.0)
    assert (batch.rows, batch.failed, batch.started_s, batch.computed_s) == (3, 0, 100.0, 0.5)
    with pytest.raises(DeadlineExceeded, match="had passed"):
        await queue.submit(7, group=None, deadline_s=100.0)
    batcher.close()


async def test_expiry_is_never_early_and_tells_each_once_who_was_not_discarded() -> None:
    told: list[tuple[str, float]] = []
    expiry: DeadlineTimer[str] = DeadlineTimer(time.monotonic, lambda item: told.append((item, time.monotonic())))
    start_s = time.monotonic()
    deadlines = {name: start_s + SOON_S * (1 + number / 3) for number, name in enumerate("abcd")}
    ticks = {name: expiry.add(name, deadline_s) for name, deadline_s in deadlines.items()}
    expiry.discard("b", ticks["b"])
    expiry.discard("b", ticks["b"])
    await until(lambda: len(told) == 3)
    assert [name for name, _ in told] == ["a", "c", "d"]
    assert all(now_s >= deadlines[name] for name, now_s in told)


async def test_deadlines_that_nobody_waits_for_are_forgotten_long_before_they_come() -> None:
    expiry: DeadlineTimer[int] = DeadlineTimer(time.monotonic, lambda item: None)
    in_an_hour_s = time.monotonic() + 3600
    kept = [expiry.add(-number, in_an_hour_s + number) for number in range(1, 11)]
    for number in range(50 * MIN_SWEEP_TICKS):
        expiry.discard(number, expiry.add(number, in_an_hour_s + number * TICK_S))
        assert len(expiry._ticks) == len(expiry._timers) <= 2 * MIN_SWEEP_TICKS
    expiry.close()
    assert set(expiry._ticks) == set(kept)
    for number, tick in enumerate(kept, 1):
        expiry.discard(-number, tick)
    assert not expiry._ticks
    assert not expiry._timers


async def test_a_queue_that_was_closed_is_let_go_before_its_deadlines() -> None:
    """It holds on to a model."""

    batcher = Batcher()
    queue = batcher.add_queue("model", opened(), max_batch_rows=2, max_queue_rows=2)
    assert await answer(queue, Request(1), deadline_s=time.monotonic() + 3600) == 10
    queue.close()
    batcher.close()
    gone = weakref.ref(queue)
    del queue, batcher
    gc.collect()
    assert gone() is None


async def test_a_model_without_weights_fails_a_batch_once_and_as_a_whole() -> None:
    calls: list[int] = []

    def forward(batch: Batch[Any]) -> list[int]:
        requests: list[Request] = requests_of(batch)
        calls.append(len(requests))
        raise InferenceError(503, "no weights")

    batcher = Batcher()
    queue = batcher.add_queue("model", forward, max_batch_rows=8, max_queue_rows=8)
    results = await asyncio.gather(*[answer(queue, Request(number)) for number in range(8)], return_exceptions=True)
    assert {str(result) for result in results} == {"no weights"}
    assert calls == [8]
    assert queue.counts().failed == 8
    batcher.close()
