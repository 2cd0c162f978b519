"""What a replica reports of its models, and the policy on loads given by hand, with a simulated clock."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from shoal.batching.batcher import BatcherCounts
from shoal.batching.latency_model import ForwardTime
from shoal.errors import ConfigError
from shoal.serve.scaling import (
    Budget,
    Decision,
    EndpointLoad,
    LoadMeter,
    ModelLoad,
    ReplicaLoad,
    ScalePolicy,
    decode,
    encode,
)
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_options import ModelOptions
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


# -- `endpoint.scale`: floors in local time, budgets that cover them, and what cannot hold is refused

OFFICE = "mon-fri 08:00-18:00 Europe/Zurich"


@pytest.mark.parametrize(
    ("field", "values", "word"),
    [
        ("max", {}, "required"),
        ("max", {"max": 0}, "1"),
        ("objective_s", {"max": 2, "objective_s": 0}, "0"),
        ("idle_s", {"max": 2, "idle_s": 0}, "0"),
        ("floors", {"max": 2, "floors": {"mon 8-18": 1}}, "DAYS HH:MM-HH:MM ZONE"),
        ("floors", {"max": 2, "floors": {"noday 08:00-18:00": 1}}, "no known days"),
        ("floors", {"max": 2, "floors": {"08:00-18:00 Mars/Base": 1}}, "time zone"),
        ("floors", {"max": 2, "floors": {"08:00-25:00": 1}}, "no span"),
        ("floors", {"max": 2, "floors": {"08:00-08:00": 1}}, "no span"),
        ("floors", {"max": 2, "floors": {"08:61-09:00": 1}}, "no span"),
        ("floors", {"max": 2, "floors": {"08:00-18:00": 0}}, "at least 1"),
        ("budget", {"max": 2, "budget": "40"}, "40/day or 900/month"),
        ("scale", {"max": 2, "min": 3}, "max = 2 is below min = 3"),
        ("scale", {"max": 2, "floors": {OFFICE: 3}}, "above max = 2"),
        ("scale", {"max": 2, "budget": "23/day"}, "take up to 24 replica-hours a day"),
        ("scale", {"max": 2, "floors": {OFFICE: 2}, "budget": "33/day"}, "take up to 34 replica-hours a day"),
        ("scale", {"max": 2, "min": 0, "floors": {OFFICE: 1}, "budget": "229/month"}, "up to 230 replica-hours a mon"),
    ],
)
def test_what_cannot_hold_is_refused(field: str, values: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        EndpointSpec.parse({"name": "m", "scale": values})
    assert caught.value.field == ("scale" if field == "scale" else f"scale.{field}")


@pytest.mark.parametrize(
    ("floor", "when", "expected"),
    [
        (OFFICE, "2026-01-05T06:59:59", 0),  # a Monday; winter is UTC+1
        (OFFICE, "2026-01-05T07:00:00", 2),
        (OFFICE, "2026-01-05T17:00:00", 0),
        (OFFICE, "2026-07-06T06:00:00", 2),  # summer is UTC+2
        (OFFICE, "2026-07-06T16:00:00", 0),
        (OFFICE, "2026-01-04T12:00:00", 0),  # a Sunday
        ("fri 22:00-06:00", "2026-01-10T05:59:00", 2),  # of Friday's night
        ("fri 22:00-06:00", "2026-01-09T05:59:00", 0),
        ("sat-mon,wed 12:00-24:00", "2026-01-04T23:59:00", 2),
        ("sat-mon,wed 12:00-24:00", "2026-01-06T23:59:00", 0),
        ("12:00-13:00", "2026-01-06T12:30:00", 2),
    ],
)
def test_a_floor_holds_in_its_local_time(floor: str, when: str, expected: int) -> None:
    spec = ScaleSpec(min=0, max=4, floors={floor: 2})
    assert spec.find_floor(datetime.fromisoformat(when).replace(tzinfo=UTC), spec.parse_floors()) == expected


def test_a_budget_sets_aside_what_the_floors_take_until_the_period_ends() -> None:
    spec = ScaleSpec(max=4, floors={"00:00-12:00": 2}, budget="40/day")  # floors take 36
    midnight_s = datetime(2026, 1, 6, tzinfo=UTC).timestamp()
    budget = Budget(spec)
    budget.spend(2, midnight_s)
    budget.spend(2, midnight_s + 12 * 3600)
    assert budget.is_available(midnight_s + 12 * 3600)
    budget.spend(4, midnight_s + 13.5 * 3600)
    assert budget.spent_s == pytest.approx(30 * 3600)
    assert not budget.is_available(midnight_s + 13.5 * 3600)  # 10.5 h of one replica remain, and 10 replica-hours
    again = Budget(spec, budget.charged_s, budget.spent_s)  # a restarted process goes on
    again.spend(0, midnight_s + 23 * 3600)
    assert again.spent_s == budget.spent_s
    again.spend(1, midnight_s + 25 * 3600)
    assert again.spent_s == 3600  # a new day
    assert again.is_available(midnight_s + 25 * 3600)


def test_a_month_ends_with_the_calendars() -> None:
    first_s, next_s = (datetime(2026, month, 1, tzinfo=UTC).timestamp() for month in (2, 3))
    budget = Budget(ScaleSpec(max=2, budget="745/month"), first_s)
    budget.spend(2, next_s - 3600)
    assert budget.spent_s == 2 * (28 * 24 - 1) * 3600
    assert not budget.is_available(next_s - 3600)
    budget.spend(1, next_s + 60)
    assert budget.spent_s == 60


def test_the_objective_is_the_shortest_deadline_unless_it_is_given() -> None:
    models = {"a": {"deadline_s": 0.2}, "b": {"deadline_s": 0.1}}
    assert EndpointSpec.parse({"name": "m", "scale": {"max": 2}, "models": models}).objective_s == 0.1
    assert EndpointSpec.parse({"name": "m", "scale": {"max": 2, "objective_s": 2}, "models": models}).objective_s == 2.0
    assert EndpointSpec.parse({"name": "m", "scale": {"max": 2}}).objective_s == 0.5


def test_a_fixed_number_and_scale_exclude_each_other_and_words_choose_scale() -> None:
    with pytest.raises(ConfigError, match=r"num_replicas = 2 is a fixed number: with `scale`, give scale.min"):
        EndpointSpec.parse({"name": "m", "num_replicas": 2, "scale": {"max": 3}})
    scaled = EndpointSpec(name="m").override(["scale.max=3", "scale.min=0", f'scale.floors={{"{OFFICE}": 2}}'])
    assert (scaled.least_replicas, scaled.most_replicas) == (0, 3)
    assert EndpointSpec.from_record(scaled.to_record()) == scaled
    with pytest.raises(ConfigError, match=r"the most replicas under load are scale.max"):
        EndpointSpec(name="m").override(["max_replicas=3"])
    with pytest.raises(ConfigError, match=r"end the endpoint, then `shoal serve deploy MODEL --replicas N`"):
        ModelOptions().override(["num_replicas=3"])
    fixed = EndpointSpec(name="m", num_replicas=2)
    assert (fixed.least_replicas, fixed.most_replicas) == (2, 2)
