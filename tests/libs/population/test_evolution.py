"""Evolutions: the toy problem of the PBT paper, whom each rule replaces, that a killed run decides the same, and
lineages."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from shoal.errors import ConfigError, TrainError
from shoal.libs.population.evolution import Decisions, Evolution, EvolutionSpec, Halving, build_evolution
from shoal.libs.population.lineage import Lineage, Stretch
from shoal.search.space import SearchSpace

Values = list[dict[str, Any]]
RATE = SearchSpace.parse({"optimizer.learning_rate": "log(1e-4,1)"})
MIXED = SearchSpace.parse(
    {"rate": "log(1e-4,1)", "noise": "uniform(0,0.3)", "width": "int(1,9)", "act": ["relu", "tanh"]}
)
NAMES = ("pbt", "halving", "random_search")


def build(name: str, space: SearchSpace = RATE, members: int = 8, rounds: int = 40, **fields: Any) -> Evolution:
    return build_evolution(EvolutionSpec.parse({"name": name, **fields}), space, members, num_rounds=rounds, seed=3)


def apply(decisions: Decisions, values: Values) -> Values:
    """The hyper-parameters of the next round."""
    return [dict(decisions.changes.get(member, each)) for member, each in enumerate(values)]


# -- the toy problem (1711.09846, figure 2) ---------------------------------------------------------------------------


def climb(theta: np.ndarray, h: np.ndarray, num_steps: int) -> np.ndarray:
    """Gradient ascent on the surrogate 1.2 - (h0 θ0² + h1 θ1²), with the rate 0.02."""
    for _ in range(num_steps):
        theta = theta - 0.02 * 2 * h * theta
    return theta


def judge(theta: np.ndarray) -> float:
    return float(1.2 - (theta**2).sum())


@pytest.mark.parametrize("seed", range(5))
def test_the_toy_problem_is_solved_as_the_paper_says(seed: int) -> None:
    space = SearchSpace.parse({"h0": "uniform(0,1)", "h1": "uniform(0,1)"})
    spec = EvolutionSpec(name="pbt", quantile=0.5, resample=0.0)
    evolution = build_evolution(spec, space, 2, num_rounds=50, seed=seed)
    values: Values = [{"h0": 0.0, "h1": 1.0}, {"h0": 1.0, "h1": 0.0}]
    thetas = [np.array([0.9, 0.9])] * 2
    for round_number in range(1, 51):  # 200 steps, as in the paper, with a decision after every fourth
        thetas = [climb(theta, np.array([h["h0"], h["h1"]]), 4) for theta, h in zip(thetas, values, strict=True)]
        decisions = evolution.next(round_number, [judge(theta) for theta in thetas], values)
        thetas = [thetas[dict(decisions.copies).get(member, member)] for member in range(2)]
        values = apply(decisions, values)
    grid = [judge(climb(np.array([0.9, 0.9]), np.array(h), 200)) for h in ([0.0, 1.0], [1.0, 0.0])]
    assert max(grid) == pytest.approx(0.39, abs=1e-3)  # 1.2 - 0.9²: one parameter never moves
    assert max(judge(theta) for theta in thetas) > 1.15


# -- selection --------------------------------------------------------------------------------------------------------


def test_pbt_replaces_the_worst_by_the_best_and_nothing_else() -> None:
    evolution = build("pbt", members=8, quantile=0.25)
    values = evolution.sample()
    decisions = evolution.next(1, [5, 1, 7, 3, 8, 2, 6, 4], values)
    assert [loser for loser, _ in decisions.copies] == [1, 5]
    assert {winner for _, winner in decisions.copies} <= {2, 4}
    assert set(decisions.changes) == {1, 5}
    for loser, winner in decisions.copies:
        assert decisions.changes[loser] != values[winner]
    assert decisions == Decisions(copies=decisions.copies, changes=decisions.changes)


def test_pbt_waits_for_its_rounds_and_leaves_the_last_round_alone() -> None:
    evolution = build("pbt", rounds=6, every=3)
    decided = [bool(evolution.next(round_number, range(8), evolution.sample()).copies) for round_number in range(1, 7)]
    assert decided == [False, False, True, False, False, False]


def test_a_member_without_a_number_is_retired_and_replaced_at_once() -> None:
    evolution = build("pbt", every=5)
    scores = [1.0, math.nan, 3.0, math.inf, 5.0, 6.0, 7.0, 8.0]
    decisions = evolution.next(1, scores, evolution.sample())
    assert decisions.retired == (1, 3)
    assert [loser for loser, _ in decisions.copies] == [1, 3] == sorted(decisions.changes)
    assert {winner for _, winner in decisions.copies} <= {6, 7}
    decided = build("pbt", members=4).next(1, [math.nan, 1.0, 2.0, 3.0], evolution.sample()[:4])
    assert [loser for loser, _ in decided.copies] == [0], "it counts as the worst: the quantile is one member"


def test_a_single_survivor_is_copied_by_all_others() -> None:
    evolution = build("pbt", members=4)
    decisions = evolution.next(1, [math.nan, math.nan, 2.0, math.nan], evolution.sample())
    assert decisions.copies == ((0, 2), (1, 2), (3, 2))


@pytest.mark.parametrize("name", NAMES)
def test_a_population_without_any_number_ends_with_the_cause(name: str) -> None:
    evolution = build(name)
    with pytest.raises(TrainError, match="no member has a finite score after round 2: all diverged"):
        evolution.next(2, [math.nan] * 8, evolution.sample())


@pytest.mark.parametrize("name", NAMES)
def test_no_winner_is_ever_a_loser_and_values_stay_in_the_space(name: str) -> None:
    rng = np.random.default_rng(0)
    evolution = build(name, MIXED, members=9, rounds=40)
    values: Values = evolution.sample()
    for round_number in range(1, 17):
        scores = np.where(rng.random(9) < np.linspace(0, 0.2, 9), math.nan, rng.random(9))
        decisions = evolution.next(round_number, scores, values)
        losers = {loser for loser, _ in decisions.copies}
        assert not losers & {winner for _, winner in decisions.copies}
        assert not losers & set(decisions.fresh)
        assert set(decisions.retired) <= losers | set(decisions.fresh) | set(decisions.stopped)
        values = apply(decisions, values)
        for each in values:
            assert 1e-4 <= each["rate"] <= 1
            assert 0 <= each["noise"] <= 0.3
            assert each["width"] in range(1, 10)
            assert each["act"] in ("relu", "tanh")


def test_random_search_changes_nothing_and_stops_what_failed() -> None:
    evolution = build("random_search")
    decisions = evolution.next(1, [1, 2, math.nan, 4, 5, 6, 7, 8], evolution.sample())
    assert decisions == Decisions(retired=(2,), stopped=(2,))
    assert evolution.next(2, [1, 2, 99, 4, 5, 6, 7, 8], evolution.sample()) == Decisions()


# -- the same decisions after a kill ----------------------------------------------------------------------------------


def to_json(state: Mapping[str, Any]) -> Mapping[str, Any]:
    restored: Mapping[str, Any] = json.loads(json.dumps(state, allow_nan=False))
    return restored


# -- halving ----------------------------------------------------------------------------------------------------------


def test_halving_stops_all_but_the_best_third_at_each_age() -> None:
    evolution = build("halving", members=9, rounds=27, refill=False)
    assert isinstance(evolution, Halving)
    assert evolution.rungs == [1, 3, 9]
    alive = []
    for round_number in range(1, 28):
        decisions = evolution.next(round_number, np.arange(9.0), evolution.sample())
        assert not decisions.fresh
        if decisions.stopped:
            alive.append((round_number, decisions.stopped))
    assert alive == [(1, (0, 1, 2, 3, 4, 5)), (3, (6, 7))]


def test_halving_fills_rows_with_new_members_judged_at_their_own_age() -> None:
    evolution = build("halving", members=3, rounds=30, reduction=3)
    values: Values = evolution.sample()
    first = evolution.next(1, [1.0, 2.0, 3.0], values)
    assert first.fresh == (0, 1) == tuple(first.changes)
    second = evolution.next(2, [4.0, 0.0, 9.0], apply(first, values))  # 0 is better at age 1 than all before
    assert second.fresh == (1,)
    third = evolution.next(3, [4.0, 1.0, 9.0], apply(second, values))  # 2 comes to age 3 alone
    assert third.fresh == (1,)


@pytest.mark.parametrize(("rounds", "more"), [(3, 12), (9, 27), (20, 60)])
def test_a_run_by_halving_goes_on_for_more_rounds(rounds: int, more: int) -> None:
    before, after = (build("halving", members=9, rounds=each) for each in (rounds, more))
    values: Values = before.sample()
    for number in range(1, rounds + 1):
        values = apply(before.next(number, np.arange(9.0), values), values)
    after.load_state_dict(to_json(before.state_dict()))
    for number in range(rounds + 1, more + 1):
        values = apply(after.next(number, np.arange(9.0), values), values)


def test_halving_stops_a_member_without_a_number() -> None:
    evolution = build("halving", members=3, rounds=30, every=2)
    decisions = evolution.next(1, [1.0, math.nan, 3.0], evolution.sample())
    assert decisions.retired == decisions.fresh == (1,)


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "members", "rounds", "fields", "part"),
    [
        ("pbt", 1, 10, {}, "needs 2 at least"),
        ("halving", 2, 10, {}, "needs 3 at least"),
        ("halving", 9, 4, {"every": 4}, "at most 3"),
        ("random_search", 1, 0, {}, "at least 1"),
        ("pbt", 4, 10, {"quantile": 0.6}, "quantile"),
        ("pbt", 4, 10, {"factors": [1.1, 1.2]}, "one below 1"),
        ("pbt", 4, 10, {"reduction": 4}, "only with evolution.name=halving"),
        ("cmaes", 4, 10, {}, "random_search"),
    ],
)
def test_what_cannot_work_is_refused_before_work(
    name: str, members: int, rounds: int, fields: Mapping[str, object], part: str
) -> None:
    with pytest.raises(ConfigError, match=part):
        build(name, members=members, rounds=rounds, **fields)


def test_one_member_can_search_at_random() -> None:
    assert build("random_search", members=1).next(1, [0.5], [{}]) == Decisions()


# -- lineages: what the rounds of a record say about whom a member descends from


Event = tuple[str, Mapping[str, Any]]


def make_round(number: int, rates: list[float], **details: Any) -> Event:
    scores = [float(number)] * len(rates)
    return "round", {"round": number, "scores": scores, "hyper_parameters": {"rate": rates}, **details}


ROUNDS = [
    make_round(1, [0.1, 0.2, 0.3]),
    make_round(2, [0.1, 0.2, 0.3], copies=[[0, 2]]),
    make_round(3, [0.5, 0.2, 0.3], copies=[[1, 0]]),
    make_round(4, [0.5, 0.5, 0.3], fresh=[2]),
    make_round(5, [0.5, 0.5, 0.9]),
]


def stretch(member: int, begin: int, end: int, rate: float, source: int | None) -> Stretch:
    return Stretch(member, begin, end, {"rate": rate}, source)


def test_stretches_begin_at_copies_and_at_changes() -> None:
    lineage = Lineage.from_events(ROUNDS)
    assert lineage.list_stretches() == [
        stretch(0, 0, 2, 0.1, None),
        stretch(0, 2, 5, 0.5, 2),
        stretch(1, 0, 3, 0.2, None),
        stretch(1, 3, 5, 0.5, 0),
        stretch(2, 0, 4, 0.3, None),
        stretch(2, 4, 5, 0.9, None),
    ]
    assert lineage.list_copies() == [(2, 0, 2), (3, 1, 0)]
    assert (lineage.num_rounds, lineage.num_members, lineage.paths) == (5, 3, ["rate"])


def test_ancestry_follows_the_copies_to_the_start() -> None:
    lineage = Lineage.from_events(ROUNDS)
    assert lineage.trace_ancestry(1) == [
        stretch(2, 0, 2, 0.3, None),
        stretch(0, 2, 3, 0.5, 2),
        stretch(1, 3, 5, 0.5, 0),
    ]
    assert lineage.trace_ancestry(1, 3) == [stretch(1, 0, 3, 0.2, None)]
    assert lineage.trace_ancestry(2) == [stretch(2, 4, 5, 0.9, None)]


def test_a_stopped_member_has_no_stretches_after_it() -> None:
    lineage = Lineage.from_events([make_round(1, [0.1, 0.2], stopped=[1]), make_round(2, [0.1, 0.2])])
    assert lineage.list_stretches() == [stretch(0, 0, 2, 0.1, None), stretch(1, 0, 1, 0.2, None)]


def test_rounds_of_a_resumed_run_replace_what_was_given_up() -> None:
    events: list[Event] = [*ROUNDS[:4], ("resumed", {}), make_round(3, [0.5, 0.2, 0.3], copies=[[2, 1]])]
    lineage = Lineage.from_events(events)
    assert lineage.num_rounds == 3
    assert lineage.list_copies() == [(2, 0, 2), (3, 2, 1)]


@pytest.mark.parametrize("name", ["pbt", "halving"])
def test_ancestry_is_what_the_weights_have_seen(name: str) -> None:
    """Each member's weights are the list of the (round, rate) it was trained with; copies copy the list."""
    space = SearchSpace.parse({"rate": "log(1e-4,1)"})
    evolution = build_evolution(EvolutionSpec.parse({"name": name}), space, 6, num_rounds=40, seed=1)
    values, rng = evolution.sample(), np.random.default_rng(0)
    weights: list[list[tuple[int, float]]] = [[] for _ in range(6)]
    events = []
    for number in range(1, 20):
        weights = [[*seen, (number, each["rate"])] for seen, each in zip(weights, values, strict=True)]
        scores = rng.random(6)
        decisions = evolution.next(number, scores, values)
        rates = [each["rate"] for each in values]
        events.append(make_round(number, rates, copies=decisions.copies, fresh=decisions.fresh))
        if number < 19:
            before = list(weights)
            for loser, winner in decisions.copies:
                weights[loser] = before[winner]
            for member in decisions.fresh:
                weights[member] = []
            values = [dict(decisions.changes.get(member, each)) for member, each in enumerate(values)]
    lineage = Lineage.from_events(events)
    for member in range(6):
        traced = [
            (number, each.values["rate"])
            for each in lineage.trace_ancestry(member)
            for number in range(each.begin + 1, each.end + 1)
        ]
        assert traced == weights[member]
