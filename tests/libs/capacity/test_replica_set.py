"""Several replicas: the very schedule of the scheduler for one, and rates that an independent simulation confirms."""

import heapq
import math

import numpy as np
import pytest

from shoal.batching.latency_model import ForwardTime
from shoal.libs.capacity.replica_set import ReplicaSet, SustainableRates, predict_p99, run
from shoal.libs.capacity.simulation import ScheduleServer, drive, poisson

FORWARD = ForwardTime([(1, 0.0205), (32, 0.036)])  # 20 ms + 0.5 ms per item
SECONDS = FORWARD.tabulate(32)


@pytest.mark.parametrize("rate", [20.0, 300.0, 800.0])
def test_one_replica_keeps_the_schedulers_own_schedule(rate: float) -> None:
    arrivals = poisson(rate, 3000)
    latencies, by_scheduler = run(SECONDS, 1, arrivals), drive(ScheduleServer(32), FORWARD, arrivals)
    assert len(latencies) == by_scheduler.answered == 3000
    for percent, expected in ((50, by_scheduler.p50_s), (90, by_scheduler.p90_s), (99, by_scheduler.p99_s)):
        assert np.percentile(latencies, percent) == pytest.approx(expected, abs=1e-9)


def drive_schedulers(replicas: int, arrivals: list[float]) -> list[float]:
    """The scheduler itself, once for each replica, behind an ingress written on an event queue of its own."""
    servers = [ScheduleServer(32) for _ in range(replicas)]
    unanswered = [0] * replicas
    sent = [0] * replicas
    busy = [False] * replicas
    latencies = []
    events: list[tuple[float, int, int, list[int]]] = [(at, 1, number, []) for number, at in enumerate(arrivals)]
    heapq.heapify(events)

    def start(replica: int, now_s: float) -> None:
        if batch := servers[replica].start(now_s):
            heapq.heappush(events, (now_s + FORWARD.seconds(len(batch)), 0, replica, batch))
        busy[replica] = bool(batch)

    while events:
        now_s, is_arrival, number, batch = heapq.heappop(events)
        if is_arrival:
            chosen = min(range(replicas), key=lambda each: (unanswered[each], sent[each]))
            unanswered[chosen] += 1
            sent[chosen] += 1
            servers[chosen].arrive(number, now_s, None)
            if not busy[chosen]:
                start(chosen, now_s)
            continue
        latencies += [now_s - arrivals[each] for each in batch]
        unanswered[number] -= len(batch)
        servers[number].finish(batch, now_s, FORWARD.seconds(len(batch)))
        start(number, now_s)
    return latencies


def test_several_replicas_do_as_several_schedulers_behind_one_ingress() -> None:
    arrivals = poisson(1500.0, 3000)
    assert sorted(run(SECONDS, 3, arrivals)) == pytest.approx(sorted(drive_schedulers(3, arrivals)), abs=1e-9)


@pytest.mark.parametrize("max_batch", [1, 32])
def test_the_rate_that_is_sustained_meets_the_objective_on_other_arrivals_and_little_more_does_not(
    max_batch: int,
) -> None:
    seconds, objective_s = SECONDS[:max_batch], 0.08
    rates = SustainableRates(seconds, objective_s)
    for replicas in (1, 3):
        rate = rates.find(replicas)
        assert np.percentile(run(seconds, replicas, poisson(rate, 20_000, seed=7)), 99) < 1.15 * objective_s
        assert predict_p99(seconds, replicas, 1.25 * rate, seed=7) > objective_s
        assert rates.count_replicas(rate, most=9) == replicas
    assert rates.find(3) > 3 * rates.find(1) * 0.999  # they share what comes
    assert rates.find(8) == pytest.approx(2 * rates.find(4))


def test_an_objective_below_one_forward_needs_all_replicas_and_one_above_any_wait_the_capacity() -> None:
    assert SustainableRates(SECONDS, 0.02).find(1) == 0.0
    assert SustainableRates(SECONDS, 0.02).count_replicas(1.0, most=5) == 5
    assert SustainableRates(SECONDS, 60.0).find(2) == pytest.approx(0.95 * 2 * FORWARD.capacity_per_s(32))
    assert predict_p99(SECONDS, 1, 2000.0) == math.inf


def test_a_replica_that_is_removed_answers_what_it_has_and_a_full_queue_rejects() -> None:
    simulated = ReplicaSet([1.0], max_queue=1)
    simulated.add()
    for _ in range(3):
        simulated.arrive(0.0, 0.0)
    assert (simulated.rejected, simulated.serving[0].load) == (1, 2)
    simulated.add()
    simulated.remove()
    simulated.remove()
    assert len(simulated.draining) == 2
    simulated.advance(1.5)
    assert len(simulated.draining) == 1
    simulated.advance(2.0)
    assert (simulated.draining, simulated.latencies_s) == ([], [1.0, 2.0])
