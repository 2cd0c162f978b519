"""The simulation: exact where a formula is known, close to the oracle, with admission no collapse; several replicas."""

import heapq
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from benchmarks.serving.classic import ClassicServer

from shoal.batching.latency_model import ForwardTime
from shoal.errors import ConfigError
from shoal.libs.capacity.replica_set import ReplicaSet, SustainableRates, predict_p99, run
from shoal.libs.capacity.simulation import ScheduleServer, drive, poisson, simulate
from shoal.serve.model.warm_up import batch_sizes

MEASURED = [(1, 0.0205), (32, 0.036)]  # 20 ms + 0.5 ms per item
FORWARD = ForwardTime(MEASURED)
CAPACITY = FORWARD.capacity_per_s(32)


def test_batches_of_one_are_the_queue_of_the_textbook() -> None:
    """M/D/1: the mean number in service is the load, the mean wait load * service / (2 (1 - load))."""
    service_s, load = 0.01, 0.7
    result = drive(ScheduleServer(1), ForwardTime([(1, service_s)]), poisson(load / service_s, 30_000))
    assert result.utilisation == pytest.approx(load, rel=0.03)
    assert result.mean_batch_rows == 1
    # The median of M/D/1 at this load, from Erlang's series for the distribution of the wait: 0.68 services of waiting.
    assert result.p50_s == pytest.approx(service_s * (1 + _median_wait_md1(load)), rel=0.1)


def _median_wait_md1(load: float) -> float:
    """In services. P(wait <= t) = (1 - a) sum over k <= t of (a (k - t))^k / k! * exp(a (t - k)); Erlang 1909."""

    def below(t: float) -> float:
        terms = (
            (load * (k - t)) ** k / math.factorial(k) * math.exp(-load * (k - t)) for k in range(math.floor(t) + 1)
        )
        return (1 - load) * sum(terms)

    low, high = 0.0, 20.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < 0.5 else (low, middle)
    return high


@pytest.mark.parametrize("requests_per_s", [60, 200, 400, 800])
def test_ours_is_the_oracle_and_no_timeout_beats_it_by_much(requests_per_s: float) -> None:
    arrivals = poisson(requests_per_s, 6000)
    oracle = drive(ClassicServer(32, 0.0), FORWARD, arrivals)
    ours = drive(ScheduleServer(32), FORWARD, arrivals)
    assert (ours.p50_s, ours.p99_s) == (oracle.p50_s, oracle.p99_s)
    for timeout_s in (0.002, 0.005, 0.02, 0.05):
        classic = drive(ClassicServer(32, timeout_s), FORWARD, arrivals)
        assert ours.p50_s <= classic.p50_s * 1.05
        assert ours.p99_s <= classic.p99_s * 1.05


@pytest.mark.parametrize("over", [1.2, 2.0])
@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_overload_within_a_deadline_keeps_nine_tenths_and_collapses_without_admission(
    over: float, spread: float
) -> None:
    arrivals = poisson(over * CAPACITY, 15_000)
    admitted = drive(ScheduleServer(32), FORWARD, arrivals, deadline_s=0.1, spread=spread)
    assert admitted.goodput_per_s >= 0.9 * CAPACITY
    assert admitted.answered + admitted.refused == admitted.requests
    collapsed = drive(ScheduleServer(32, admission=False), FORWARD, arrivals, deadline_s=0.1, spread=spread)
    assert collapsed.goodput_per_s < 0.1 * CAPACITY


def test_a_tight_deadline_under_heavy_load_does_not_force_small_batches() -> None:
    """Though 60 ms are less than two full batches of 36 ms: admission foresees that its batch will be full."""
    result = drive(ScheduleServer(32), FORWARD, poisson(2 * CAPACITY, 15_000), deadline_s=0.06)
    assert result.goodput_per_s >= 0.9 * CAPACITY


class Slowed(ForwardTime):
    """Some of the forwards are slow: those that `is_slow` says, by their number and rows."""

    def __init__(self, is_slow: Callable[[int, int], bool]) -> None:
        super().__init__(SLOPE)
        self._is_slow, self._started = is_slow, 0

    def seconds(self, rows: int) -> float:
        self._started += 1
        return 0.4 if self._is_slow(self._started, rows) else super().seconds(rows)


SLOPE = [(1, 0.0205), (64, 0.052)]
WARM = [(rows, ForwardTime(SLOPE).seconds(rows)) for rows in batch_sizes(64)]


@pytest.mark.parametrize("warm", [WARM, []])
@pytest.mark.parametrize("deadline_s", [0.05, 0.1])
def test_one_slow_batch_costs_no_more_than_itself(warm: list[tuple[int, float]], deadline_s: float) -> None:
    slow = iter([True])
    forward = Slowed(lambda number, rows: rows == 6 and next(slow, False))
    result = drive(ScheduleServer(64, warm=warm), forward, poisson(400, 8000), deadline_s=deadline_s)
    assert result.answered >= 0.92 * 8000  # 200 come while it lasts; with 50 ms some are refused in any case


@pytest.mark.parametrize("warm", [WARM, []])
def test_a_slow_spell_is_over_when_it_is_over(warm: list[tuple[int, float]]) -> None:
    """Of single requests, when there are few; then many come, and need large batches: within a second they get them."""
    few = poisson(20, 200)
    many = [few[-1] + seconds for seconds in poisson(400, 8000)]
    forward = Slowed(lambda number, rows: 100 <= number < 115)
    server = ScheduleServer(64, warm=warm)
    drive(server, forward, few, deadline_s=0.1)
    result = drive(server, forward, many, deadline_s=0.1)
    assert result.answered >= 8000 - 1.5 * 400


def test_several_slots_share_the_load() -> None:
    one = simulate(MEASURED, 700, max_batch_rows=32, num_requests=5000)
    two = simulate(MEASURED, 700, max_batch_rows=32, num_requests=5000, slots=2)
    assert two.p50_s < one.p50_s
    assert two.utilisation <= one.utilisation
    assert two.refused == one.refused == 0


def test_a_full_queue_refuses() -> None:
    result = simulate(MEASURED, 3 * CAPACITY, max_batch_rows=32, max_queue_rows=64, num_requests=5000)
    assert result.answered == pytest.approx(5000 / 3, rel=0.1)
    assert result.utilisation > 0.95
    assert result.p99_s < 0.2


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"measured": []}, "measured"),
        ({"measured": [(0, 0.1)]}, "measured"),
        ({"measured": [(1, 0.0)]}, "measured"),
        *(({"requests_per_s": rate}, "requests_per_s") for rate in (0.0, math.inf)),
        *(({"deadline_s": deadline_s}, "deadline_s") for deadline_s in (0.0, -1.0, math.nan)),
        ({"num_requests": 0}, "num_requests"),
    ],
)
def test_values_that_make_no_sense_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        simulate(**{"measured": MEASURED, "requests_per_s": 1.0, "max_batch_rows": 32, **changes})
    assert caught.value.field == field


# -- several replicas: for one the scheduler's very schedule, and rates that another simulation confirms


AFFINE = ForwardTime([(1, 0.0205), (32, 0.036)])  # 20 ms + 0.5 ms per item
SECONDS = AFFINE.tabulate(32)


@pytest.mark.parametrize("rate", [20.0, 300.0, 800.0])
def test_one_replica_keeps_the_schedulers_own_schedule(rate: float) -> None:
    arrivals = poisson(rate, 3000)
    latencies, by_scheduler = run(SECONDS, 1, arrivals), drive(ScheduleServer(32), AFFINE, arrivals)
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
            heapq.heappush(events, (now_s + AFFINE.seconds(len(batch)), 0, replica, batch))
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
        servers[number].finish(batch, now_s, AFFINE.seconds(len(batch)))
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
    assert SustainableRates(SECONDS, 60.0).find(2) == pytest.approx(0.95 * 2 * AFFINE.capacity_per_s(32))
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
