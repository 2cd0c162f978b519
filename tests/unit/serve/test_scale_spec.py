"""`endpoint.scale`: floors in local time, budgets that cover them, and what cannot hold is refused."""

from datetime import UTC, datetime
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.serve.scaling.policy import Budget
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_options import ModelOptions
from shoal.serve.spec.scale import ScaleSpec

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
