"""The policy on loads given by hand and on traces, with a simulated clock."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.batching.replica_set import tabulate
from shoal.batching.simulate import ForwardTime, poisson
from shoal.errors import DataError
from shoal.serve.scaling.policy import Budget, Decision, EndpointLoad, ReplicaLoad, ScalePolicy
from shoal.serve.scaling.trace_replay import ReplayedTrace, read_trace, replay_fixed, replay_policy
from shoal.serve.spec.scale import ScaleSpec

FORWARD = ForwardTime([(1, 0.0205), (32, 0.036)])  # carries 889 requests/s
SECONDS = tabulate(FORWARD, 32)
CURVE = tuple(enumerate(SECONDS, 1))
MONDAY_S = datetime(2026, 1, 5, tzinfo=UTC).timestamp()


class Endpoint:
    """Reports its load to the policy once a second and has at once what is decided."""

    def __init__(self, objective_s: float = 0.2, start_s: float = MONDAY_S, **scale: Any) -> None:
        self.policy = ScalePolicy(ScaleSpec(**scale), objective_s)
        self.now_s = start_s
        self.load = ReplicaLoad(0.0, 0.0, 0.0, CURVE)
        self.replicas = scale.get("min", 1)

    def run(self, seconds: int, rate: float = 0.0, waiting: float = 0.0, loop_s: float = 0.0) -> Decision:
        """For so long, the same load at the first replica."""
        for _ in range(seconds):
            self.now_s += 1.0
            self.load = replace(
                self.load, requests=self.load.requests + rate, waiting=waiting, loop_s=self.load.loop_s + loop_s
            )
            there = {"a": self.load} if self.replicas else {}
            unrouted = 0.0 if self.replicas else rate
            decision = self.policy.decide(EndpointLoad(self.now_s, there, self.replicas, self.replicas, unrouted))
            self.replicas = decision.replicas
        return decision


def test_replicas_come_within_seconds_and_go_after_a_minute() -> None:
    endpoint = Endpoint(max=4)
    assert endpoint.run(10, rate=100).replicas == 1
    assert endpoint.run(5, rate=1500).replicas == 3
    assert endpoint.run(50, rate=100).replicas == 3
    decision = endpoint.run(20, rate=100)
    assert (decision.replicas, decision.reason, decision.requests_per_s) == (1, "load", 100.0)


def test_a_backlog_and_a_busy_event_loop_add_replicas() -> None:
    assert Endpoint(max=4).run(5, rate=100, waiting=100).replicas == 1
    assert Endpoint(max=4).run(5, rate=100, waiting=5000).replicas == 2
    assert Endpoint(max=4).run(5, rate=100, loop_s=0.9).replicas == 2


def test_an_objective_that_is_tighter_takes_more_replicas() -> None:
    one_by_one = tuple((rows, 0.02 * rows) for rows in range(1, 33))  # nothing is gained by batches

    def need(objective_s: float) -> int:
        endpoint = Endpoint(objective_s, max=8)
        endpoint.load = replace(endpoint.load, curve=one_by_one)
        return endpoint.run(5, rate=25).replicas

    assert need(2.0) < need(0.15) < need(0.03)


def test_an_idle_endpoint_has_none_and_the_first_request_that_is_held_brings_one() -> None:
    endpoint = Endpoint(max=4, min=0, idle_s=100)
    endpoint.replicas = 1
    assert endpoint.run(20, rate=1).replicas == 1
    assert endpoint.run(99).replicas == 1
    decision = endpoint.run(1)
    assert (decision.replicas, decision.reason) == (0, "idle")
    assert endpoint.run(500).replicas == 0
    assert endpoint.run(1, rate=1).replicas == 1
    assert Endpoint(max=4).run(1000).replicas == 1  # without min: 0


def test_a_replica_that_a_request_has_woken_stays_until_the_endpoint_is_idle_again() -> None:
    endpoint = Endpoint(max=4, min=0, idle_s=60)
    endpoint.replicas = 1
    assert endpoint.run(70).replicas == 0
    endpoint.run(600)
    endpoint.replicas = 1  # Serve starts it by itself; the request has not been counted yet
    assert endpoint.run(50).replicas == 1
    assert endpoint.run(20).replicas == 0


def test_replicas_that_counted_before_the_policy_began_are_no_burst() -> None:
    endpoint = Endpoint(max=8)
    endpoint.now_s += 1.0
    endpoint.policy.decide(EndpointLoad(endpoint.now_s, {}, 1, 1))  # its reports are not there yet
    endpoint.load = replace(endpoint.load, requests=1e6)
    decision = endpoint.run(5, rate=5)
    assert (decision.replicas, decision.requests_per_s) == (1, pytest.approx(4, abs=2))


def test_the_oldest_replica_is_not_forgotten_while_others_come_and_go() -> None:
    endpoint = Endpoint(max=8)
    for number in range(600):
        endpoint.now_s += 1.0
        endpoint.load = replace(endpoint.load, requests=endpoint.load.requests + 5)
        there = {"a": endpoint.load, f"b{number}": ReplicaLoad(0.0, 0.0, 0.0, CURVE)}
        assert endpoint.policy.decide(EndpointLoad(endpoint.now_s, there, 2, 2)).replicas == 1


def test_an_endpoint_that_starts_is_not_idle() -> None:
    policy, now_s = ScalePolicy(ScaleSpec(max=2, min=0, idle_s=2), 0.2), MONDAY_S
    for _ in range(20):
        now_s += 1
        assert policy.decide(EndpointLoad(now_s, {}, running=0, planned=1)).replicas == 1
    there = {"r": ReplicaLoad(0, 0, 0, CURVE)}
    decided = [policy.decide(EndpointLoad(now_s + each, there, running=1, planned=1)).replicas for each in (1, 2)]
    assert decided == [1, 0]
    assert policy.decide(EndpointLoad(now_s + 3, there, running=2, planned=1)).replicas == 0  # Serve ends one at a time
    assert policy.decide(EndpointLoad(now_s + 4, {}, running=0, planned=0)).replicas == 0
    decided = [policy.decide(EndpointLoad(now_s + each, there, running=1, planned=1)).replicas for each in (60, 61, 62)]
    assert decided == [1, 1, 0]  # Serve had started one for a request that it held


def test_floors_hold_at_their_times() -> None:
    endpoint = Endpoint(max=4, min=0, idle_s=10, floors={"mon 00:01-00:02": 2})
    assert endpoint.run(59).replicas == 0
    assert endpoint.run(1) == Decision(2, "floor", 0.0)
    assert endpoint.run(59).replicas == 2
    assert endpoint.run(1).replicas == 0


def test_a_spent_budget_leaves_the_floor_until_the_next_day() -> None:
    endpoint = Endpoint(max=4, budget="25/day", start_s=MONDAY_S + 23 * 3600)  # one hour beyond min
    assert endpoint.run(1200, rate=3000).replicas == 4
    endpoint.policy.budget.spent_s += 24 * 3600  # type: ignore[union-attr]
    decision = endpoint.run(1, rate=3000)
    assert (decision.replicas, decision.reason) == (1, "budget")
    assert endpoint.run(2300, rate=3000).replicas == 1
    assert endpoint.run(200, rate=3000).replicas == 4


@pytest.mark.parametrize(
    ("scale", "spent_hours", "hours"),
    [
        ({"budget": "4/day"}, 3.9, 0.0),  # it may still wake
        ({"budget": "4/day"}, 4.1, 14.0),  # until midnight
        ({"budget": "4/day", "floors": {"12:00-13:00": 1}}, 4.1, 2.0),  # until a floor
        ({"budget": "4/day", "floors": {"09:00-11:00": 1}}, 4.1, 0.0),  # in one
        ({"budget": "4/day", "floors": {"sun 12:00-13:00": 1}}, 4.1, 14.0),
        ({"budget": "90/month"}, 90.0, 26 * 24 + 14.0),
    ],
)
def test_a_spent_budget_lets_nothing_wake_an_endpoint(scale: dict[str, Any], spent_hours: float, hours: float) -> None:
    now_s = MONDAY_S + 10 * 3600
    budget = Budget(ScaleSpec(min=0, max=2, **scale), charged_s=now_s, spent_s=spent_hours * 3600)
    assert budget.find_rejection_end(now_s) == (now_s + hours * 3600 if hours else 0.0)


def test_before_a_forward_is_measured_nothing_changes() -> None:
    endpoint = Endpoint(max=4, min=2)
    endpoint.load = replace(endpoint.load, curve=())
    decision = endpoint.run(5, rate=1000)
    assert (decision.replicas, decision.reason) == (2, "unmeasured")


def test_a_replica_that_goes_or_comes_again_is_no_burst() -> None:
    endpoint = Endpoint(max=4)
    endpoint.run(10, rate=100)
    load = EndpointLoad(endpoint.now_s + 1, {"b": ReplicaLoad(50, 0, 9.0, CURVE)}, 1, 1)
    assert endpoint.policy.decide(load).requests_per_s <= 101


def bursts(rates: list[float], span_s: float = 120.0) -> np.ndarray:
    return np.concatenate(
        [number * span_s + np.array(poisson(rate, int(rate * span_s), number)) for number, rate in enumerate(rates)]
    )


def play(arrivals: np.ndarray, start_s: float = 6.0, **scale: Any) -> ReplayedTrace:
    initial = scale.get("min", 1)
    return replay_policy(arrivals, ScalePolicy(ScaleSpec(**scale), 0.5), SECONDS, 0.5, start_s=start_s, initial=initial)


def test_a_trace_is_served_for_less_than_the_most_replicas() -> None:
    arrivals = np.sort(bursts([100, 600, 1100, 100]))
    found, most, least = play(arrivals, max=3), replay_fixed(arrivals, 3, SECONDS, 0.5), replay_fixed(
        arrivals, 1, SECONDS, 0.5
    )  # fmt: skip
    assert found.within > 0.99 > least.within
    assert found.replica_s < 0.75 * most.replica_s
    assert [replicas for _, replicas in found.planned][-1] == 1
    assert found.requests == most.requests == len(arrivals)


def test_a_cold_start_costs_its_time_and_loses_nothing() -> None:
    found = play(np.array([0.0, 0.5, 400.0, 401.0]), start_s=7.0, max=2, min=0, idle_s=60.0)
    assert found.rejected == 0
    assert 7.0 < found.p99_s < 10.0
    assert found.within == 0.0
    assert found.replica_s < 160.0
    assert play(np.array([0.0, 0.2]), start_s=7.0, max=2, min=0).rejected == 0  # ends while the first starts


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write_csv(text: str) -> Path:
        (path := tmp_path / "trace.csv").write_text(text)
        return path

    return write_csv


def test_a_trace_is_read_as_times_or_counts(write: Callable[[str], Path], tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    assert read_trace(write("time\n3.5\n1.5\n")).tolist() == [1.5, 3.5]
    assert read_trace(write("time\n2026-01-05 00:00:01\n2026-01-05 00:00:00\n")).tolist() == [MONDAY_S, MONDAY_S + 1]
    counted = read_trace(write("time,count\n0,10\n120,0\n60,20\n"))
    assert len(counted) == 30
    assert (counted < 60).sum() == 10
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"time": [1.0, 2.0], "other": ["a", "b"]}), tmp_path / "trace.parquet")
    assert read_trace(tmp_path / "trace.parquet").tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("when\n1\n2\n", "no column `time`, but when"),
        ("time\n", "no rows"),
        ("time\n1\nsoon\n", "row 0 has '1', which is no number"),
        ("time,count\n0,1\n60,\n", "`count` of row 1 is missing"),
        ("time,count\n0,1\n60,-2\n", "`count` of row 1 is -2"),
        ("time,count\n0,1.5\n60,2\n", "`count` of row 0 is 1.5"),
        ("time,count\n0,1\n0,2\n", "a minute twice"),
        ("time,count\n0,1\n30,2\n", "less than a minute apart"),
        ("time,count\n0,900000000\n60,2\n", "900,000,002 requests, and a simulation at most"),
        ("time\n5\n5\n", "fewer than two times"),
        ("", "cannot be read"),
        ("time\n1767571200000\n1767571201000\n", "after the year 9999"),
        ("time,time\n1,2\n2,3\n", "`time` more than once"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused(write: Callable[[str], Path], text: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        read_trace(write(text))


def test_a_trace_of_another_kind_or_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither \.csv nor \.parquet"):
        read_trace(tmp_path / "trace.txt")
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(tmp_path / "absent.csv")
