"""Lineages: what the rounds of a record say about whom a member descends from."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from shoal.libs.population.evolution import EvolutionSpec, build_evolution
from shoal.libs.population.lineage import Lineage, Stretch
from shoal.search.space import SearchSpace

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
