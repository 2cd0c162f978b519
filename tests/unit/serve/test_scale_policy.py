"""What a replica reports of its models, and the policy on loads given by hand, with a simulated clock."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from shoal.batching.batcher import BatcherCounts
from shoal.batching.latency_model import ForwardTime
from shoal.serve.scaling.policy import Budget, Decision, EndpointLoad, ReplicaLoad, ScalePolicy
from shoal.serve.scaling.replica_counts import LoadMeter, ModelLoad, decode, encode
from shoal.serve.spec.scale import ScaleSpec

CURVE = tuple(enumerate(ForwardTime([(1, 0.0205), (32, 0.036)]).tabulate(32), 1))  # carries 889 requests/s
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


# -- what a replica reports: requests, and the time of a batch of them

NONE = BatcherCounts()
MODEL = ModelLoad(NONE, 3, [(1, 0.01), (8, 0.08)], 8)


def test_one_model_is_its_own_curve_and_counts_rejected_requests() -> None:
    counts = BatcherCounts(submitted=10, refused_full=2, refused_late=1)
    load = LoadMeter(lambda: 1.5).measure({"a": replace(MODEL, counts=counts)})
    assert (load.requests, load.waiting, load.loop_s) == (13, 3, 1.5)
    assert [size for size, _ in load.curve] == [1, 2, 4, 8]
    assert [seconds for _, seconds in load.curve] == pytest.approx([0.01, 0.02, 0.04, 0.08])
    assert decode(encode(load) | {"ongoing": 7.0}) == load


def test_a_request_of_four_rows_takes_as_long_as_four() -> None:
    counts = BatcherCounts(submitted=5, answered=5, rows=20)
    load = LoadMeter(lambda: 0.0).measure({"a": replace(MODEL, counts=counts)})
    assert dict(load.curve) == pytest.approx({1: 0.04, 2: 0.08})


def test_two_models_share_a_replica_by_what_is_asked_of_them() -> None:
    meter, slow = LoadMeter(lambda: 0.0), replace(MODEL, latency=[(1, 0.1)])
    assert dict(meter.measure({"a": MODEL, "b": slow}).curve)[1] == pytest.approx((0.01 + 0.1) / 2)
    busy = replace(MODEL, counts=BatcherCounts(submitted=100))
    load = meter.measure({"a": busy, "b": slow})
    assert dict(load.curve)[1] == pytest.approx(0.01)
    assert load.requests == 100
    assert meter.measure({"b": slow}).requests == 100  # of a model that is gone, too


def test_without_a_measured_forward_there_is_no_curve() -> None:
    assert LoadMeter(lambda: 0.0).measure({"a": replace(MODEL, latency=[])}).curve == ()
    assert LoadMeter(lambda: 0.0).measure({}).curve == ()


def test_a_model_that_was_dropped_and_loaded_again_counts_on() -> None:
    meter = LoadMeter(lambda: 0.0)
    measured = [
        meter.measure({"a": replace(MODEL, counts=BatcherCounts(submitted=submitted))} if submitted else {}).requests
        for submitted in (20, 0, 5, 25, 3)
    ]
    assert measured == [20, 20, 25, 45, 48]
