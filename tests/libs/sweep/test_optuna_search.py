"""Optuna chooses the values of trials: from what it was told, also of trials of an earlier attempt."""

import math

import pytest

from shoal.search.space import SearchSpace

pytest.importorskip("optuna", reason="the extra `sweep` is not installed")
from shoal.libs.sweep.optuna_search import OptunaSearch

SPACE = SearchSpace.parse({"rate": "log(1e-4,1e-1)", "layers": [[8], [8, 8]], "width": "logint(2,64)"})


def score_of(parameters: dict[str, object]) -> float:
    """Best at a rate of 0.01 with two layers."""
    rate = parameters["rate"]
    assert isinstance(rate, float)
    return -abs(math.log10(rate) + 2) - (parameters["layers"] == [8])


@pytest.mark.parametrize("is_joint", [False, True])
def test_it_finds_better_values_than_its_first_ones(is_joint: bool) -> None:
    search = OptunaSearch(SPACE, is_higher=True, seed=1, is_joint=is_joint)
    scores = []
    for number in range(50):
        parameters = search.ask(number)
        assert parameters["layers"] in ([8], [8, 8])
        scores.append(score_of(parameters))
        search.report(number, 5, scores[-1])
        search.end(number, scores[-1], is_stopped=number % 3 == 0)
    assert sum(scores[-15:]) / 15 > sum(scores[:10]) / 10 + 0.3


def test_a_resumed_search_knows_what_it_was_told() -> None:
    bad = {"rate": 1e-4, "layers": [8], "width": 2}
    search = OptunaSearch(SPACE, is_higher=True, seed=1, is_joint=False)
    for number in range(30):
        good = {"rate": 0.01 * (1 + 0.01 * number), "layers": [8, 8], "width": 8}
        search.replay(good, 20, score_of(good), is_stopped=False)
        search.replay(bad, 5, score_of(bad), is_stopped=True)
    search.replay(bad, 5, math.nan, is_stopped=False)
    search.begin(60, {"rate": 0.02, "layers": [8, 8], "width": 16})
    search.end(60, math.nan, is_stopped=False)
    asked = [search.ask(number) for number in range(61, 71)]
    assert sum(each["layers"] == [8, 8] for each in asked) > 5
