"""Deadlines in the running batcher: who is refused, who expires where, and that nobody is computed for nothing."""

import asyncio
import gc
import time
import weakref
from typing import Any

import pytest

from gated_forward import GatedForward, Queue, Request, answer, opened, requests_of, until, with_queue
from shoal.batching.batcher import Batch, Batcher, DeadlineExceeded
from shoal.batching.queue import MIN_SWEEP_TICKS, TICK_S, DeadlineTimer
from shoal.errors import InferenceError

SOON_S = 0.02


def soon() -> float:
    return time.monotonic() + SOON_S


@with_queue(max_batch_rows=2, max_queue_rows=2)
async def test_a_request_that_expires_in_the_queue_is_told_so_and_never_computed(
    forward: GatedForward, queue: Queue
) -> None:
    """Though the forward hangs, and nobody else comes."""
    in_hand = asyncio.create_task(answer(queue, Request(0)))
    await forward.wait_entered()
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
    in_hand = asyncio.create_task(answer(queue, Request(0)))
    await forward.wait_entered()
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
