"""The pictures of populations and sweeps show what the frames hold, and enter the report."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from shoal import runs
from shoal.runs.report import population_plots, search_sections
from shoal.runs.report.plots import LINE, to_svg
from shoal.runs.report.population_plots import draw_genealogy, draw_member_metric, draw_schedules, is_logarithmic
from shoal.runs.report.sweep_plots import compute_importance, draw_importance, draw_parallel_coordinates
from shoal.runs.sweep_trials import TrialLog, TrialState

COLUMNS = ["member", "begin", "end", "source", "rate", "act"]
STRETCHES = DataFrame(
    [(0, 0, 2, None, 0.1, "relu"), (0, 2, 4, 1, 0.2, "tanh"), (1, 0, 4, None, 0.3, "relu")], columns=COLUMNS
)
ANCESTRY = DataFrame([(1, 0, 2, None, 0.3, "relu"), (0, 2, 4, 1, 0.2, "tanh")], columns=COLUMNS)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    return tmp_path


def blue_lines(figure: Figure, panel: int = 0) -> list[list[list[float]]]:
    from matplotlib.colors import to_rgba

    (found,) = [
        each
        for each in figure.axes[panel].collections
        if isinstance(each, LineCollection) and tuple(each.get_colors()[0]) == to_rgba(LINE)
    ]
    return [segment.tolist() for segment in found.get_segments()]


# -- populations ------------------------------------------------------------------------------------------------------


def test_a_genealogy_links_copies_to_their_source() -> None:
    figure = draw_genealogy(STRETCHES, ANCESTRY, ANCESTRY, restarts=[2])
    assert blue_lines(figure) == [[[0, 1], [2, 1]], [[2.5, 0], [4, 0]], [[2, 1], [2.5, 0]]]
    assert "restart" in to_svg(figure)


def test_rounds_have_whole_ticks() -> None:
    stretches = DataFrame([(0, 0, 1, None, 0.1, "relu"), (1, 0, 1, None, 0.3, "relu")], columns=COLUMNS)
    scores = DataFrame({0: [0.1, 0.2], 1: [0.2, 0.3]})
    for figure in (
        draw_genealogy(stretches, stretches, stretches),
        draw_schedules(stretches, stretches[:1], ["rate", "act"]),
        draw_member_metric(scores, scores[0], "accuracy"),
    ):
        for axes in figure.axes:
            assert not np.any(axes.get_xticks() % 1)


def test_schedules_are_drawn_for_each_hyper_parameter_numbers_or_not() -> None:
    figure = draw_schedules(STRETCHES, ANCESTRY, ["rate", "act"])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["rate", "act"]
    assert blue_lines(figure) == [[[0, 0.3], [2, 0.3]], [[2, 0.2], [4, 0.2]], [[2, 0.3], [2, 0.2]]]
    assert [label.get_text() for label in figure.axes[1].get_yticklabels()] == ["relu", "tanh"]
    assert blue_lines(figure, 1)[0] == [[0, 0], [2, 0]]


def test_schedules_of_booleans_and_lists_are_drawn() -> None:
    stretches = DataFrame([(0, 0, 2, None, True, [64]), (1, 0, 2, None, False, [64, 32])], columns=COLUMNS)
    figure = draw_schedules(stretches, stretches[:1], ["rate", "act"])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["False", "True"]
    assert blue_lines(figure) == [[[0, 1], [2, 1]]]


def test_numbers_over_decades_are_drawn_over_their_logarithm() -> None:
    assert is_logarithmic([1e-4, 1e-2])
    assert not is_logarithmic([0.0, 1e-2])
    assert not is_logarithmic([0.1, 0.9, math.nan])
    assert not is_logarithmic([])
    assert not is_logarithmic([1e-4, 1e-2], "noise", {"rate"})  # uniform draws can be small
    assert is_logarithmic([0.1, 0.2], "rate", {"rate"})


def test_the_metric_of_members_has_a_line_for_each_and_the_best() -> None:
    scores = DataFrame({0: [0.1, 0.2], 1: [0.3, math.nan]}, index=[1, 2])
    figure = draw_member_metric(scores, Series({1: 0.3, 2: 0.2}), "accuracy$x^$")
    assert len(figure.axes[0].lines) == 2 + 2  # the median, too
    assert figure.axes[0].lines[-1].get_ydata().tolist() == [0.3, 0.2]
    assert "accuracy$x^$" in to_svg(figure)


# -- sweeps -----------------------------------------------------------------------------------------------------------


def make_trials(num_trials: int = 60) -> DataFrame:
    rng = np.random.default_rng(0)
    return DataFrame(
        {
            "rate": 10 ** rng.uniform(-4, 0, num_trials),
            "name": rng.choice(["adam", "sgd"], num_trials),
            "is_deep": rng.random(num_trials) < 0.5,
            "idle": rng.random(num_trials),
        }
    )


def test_importance_is_the_share_of_the_variance() -> None:
    """score = 2 a + b with a, b uniform: shares of 4/5 and 1/5; the forest's error is a tenth here."""
    rng = np.random.default_rng(0)
    trials = DataFrame({"b": rng.random(300), "idle": rng.random(300), "a": rng.random(300)})
    found = compute_importance(trials, 2 * trials["a"] + trials["b"])
    assert found is not None
    assert list(found["parameter"]) == ["a", "b", "idle"]
    assert found["importance"].to_numpy() == pytest.approx([0.8, 0.2, 0.0], abs=0.1)
    again = compute_importance(trials, 2 * trials["a"] + trials["b"])
    assert again is not None
    assert again.equals(found)


def test_importance_is_known_of_logarithms_texts_and_booleans() -> None:
    trials = make_trials()
    for parameter, scores in {
        "rate": -np.abs(np.log10(trials["rate"]) + 2),
        "name": (trials["name"] == "adam").astype(float),
        "is_deep": trials["is_deep"].astype(float),
    }.items():
        found = compute_importance(trials, scores)
        assert found is not None
        assert found["parameter"][0] == parameter
        assert found["importance"][0] > 0.8


def test_importance_is_none_where_nothing_can_be_said() -> None:
    trials, scores = make_trials(9), Series(np.arange(9.0))
    assert compute_importance(trials, scores) is not None
    scores[[0, 1]] = math.nan
    assert compute_importance(trials, scores) is None  # seven are left
    assert compute_importance(make_trials(20), Series(np.ones(20))) is None


def test_parallel_coordinates_have_a_line_for_each_trial_the_best_on_top() -> None:
    trials = make_trials(5)
    trials.index = [3, 1, 4, 15, 9]
    scores = Series([0.1, 0.9, math.nan, 0.5, 0.3], index=trials.index)
    figure = draw_parallel_coordinates(trials, scores, "loss", higher_is_better=False)
    lines = [line for line in figure.axes[0].lines if len(line.get_ydata()) == 5]
    assert len(lines) == 5
    assert max(lines, key=lambda line: line.get_zorder()) is lines[0]
    assert [float(line.get_ydata()[-1]) for line in lines if line is not lines[2]] == pytest.approx([0, 1, 0.5, 0.25])
    heights = lines[0].get_ydata()
    log = np.log(trials["rate"].to_numpy())
    assert float(heights[0]) == pytest.approx((log[0] - log.min()) / np.ptp(log))


@pytest.mark.parametrize("num_trials", [1, 2])
def test_few_trials_and_long_names_are_drawn(num_trials: int) -> None:
    trials = make_trials(num_trials).rename(columns={"rate": "a.$x^$" * 20, "idle": "other.$x^$"})
    scores = Series([math.nan] * num_trials)
    assert "svg" in to_svg(draw_parallel_coordinates(trials, scores, "score"))
    bars = DataFrame({"parameter": ["a.$x^$" * 20], "importance": [0.5], "spread": [0.1]})
    assert "$x^$" in to_svg(draw_importance(bars))


# -- the report -------------------------------------------------------------------------------------------------------


def record_population(run: runs.RunRecorder, rounds: list[dict[str, Any]], metric: str = "accuracy") -> None:
    run.record_event("population", metric=metric, is_higher_better=metric != "loss", members=3)
    for number, details in enumerate(rounds, start=1):
        scores = {f"member/{member:02}/{metric}": score for member, score in enumerate(details["scores"])}
        run.log(number, {name: math.nan if score is None else score for name, score in scores.items()})
        run.log(number, {f"validation/{metric}": 0.1 * number})
        run.record_event("round", round=number, **details)


ROUNDS: list[dict[str, Any]] = [
    {
        "scores": [0.1, 0.2, 0.3],
        "hyper_parameters": {"optimizer.learning_rate": [0.1, 0.01, 0.001]},
        "copies": [[0, 2]],
    },
    {
        "scores": [0.4, 0.7, None],
        "hyper_parameters": {"optimizer.learning_rate": [0.002, 0.01, 0.001]},
        "copies": [[2, 1]],
    },
    {"scores": [0.5, 0.6, 0.55], "hyper_parameters": {"optimizer.learning_rate": [0.002, 0.01, 0.02]}},
]


def test_a_population_has_its_members_genealogy_and_schedules_in_the_report() -> None:
    with runs.create("population", "", "one") as run:
        record_population(run, ROUNDS)
    page = runs.write_report(runs.load("one")).read_text()
    for told in ("Genealogy", "2 copies in 3 rounds", "the ancestors of member 1 after round 2, the best"):
        assert told in page, told
    assert "Schedules that were found" in page
    assert page.count("<svg") == 5  # with the learning curve over steps and over seconds; none for single members
    assert "member/00" not in page.split("<h2>Events")[0]


def test_the_scales_of_the_report_are_those_of_the_space(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[object] = []
    draw = population_plots.draw_schedules
    monkeypatch.setattr(population_plots, "draw_schedules", lambda *given: drawn.append(given[3]) or draw(*given))
    space = "space: {optimizer.learning_rate: 'log(1e-3, 1)', noise: 'uniform(0,1)', width: 'logint(1,9)', act: [a, b]}"
    with runs.create("population", space, "one") as run:
        record_population(run, ROUNDS)
    search_sections.build_search_sections(runs.load("one"))
    assert drawn == [{"optimizer.learning_rate", "width"}]


def test_the_members_of_the_report_are_sorted_by_their_score() -> None:
    with runs.create("population", "", "one") as run:
        record_population(run, ROUNDS)
    table = search_sections.build_search_sections(runs.load("one"))[-1]
    assert table.header == ["member", "accuracy", "optimizer.learning_rate", "copied"]
    assert [row[0] for row in table.rows] == ["1", "2", "0"]
    assert table.rows[0] == ["1", "0.6", "0.01", "1"]


def test_the_best_has_the_lowest_score_where_less_is_better() -> None:
    with runs.create("population", "", "one") as run:
        record_population(run, ROUNDS, metric="loss")
    first = search_sections.build_search_sections(runs.load("one"))[0]
    assert "member 0 after round 1" in first.note


def test_a_population_without_a_score_and_other_runs_have_no_such_sections() -> None:
    with runs.create("population", "", "one") as run:
        record_population(run, [ROUNDS[0] | {"scores": [None, None, None]}])
    with runs.create("train", "", "two") as run:
        run.log(1, {"train/loss": 1.0})
    assert search_sections.build_search_sections(runs.load("one")) == []
    assert search_sections.build_search_sections(runs.load("two")) == []


def record_sweep(run: runs.RunRecorder, num_trials: int) -> None:
    log = TrialLog(run)
    log.begin(num_trials=40, metric="validation/accuracy", is_higher=True, search="random", scheduler="asha")
    for number, (_, parameters) in enumerate(make_trials(num_trials).iterrows()):
        log.start(
            number,
            f"one-{number}",
            {name: getattr(value, "item", lambda v=value: v)() for name, value in parameters.items()},
        )
        score = -abs(math.log10(parameters["rate"]) + 2)
        log.report(number, 10, 1.0, {"validation/accuracy": score})
        if number:
            log.end(number, TrialState.FINISHED, 10, {"validation/accuracy": score})


def test_a_sweep_has_its_trials_and_their_importance_in_the_report() -> None:
    with runs.create("sweep", "", "one") as run:
        record_sweep(run, 12)
    page = runs.write_report(runs.load("one")).read_text()
    for told in ("12 of 40 trials", "Importance of the parameters", "share of the score's variance", "one-11"):
        assert told in page, told
    assert "trial-003" not in page


def test_a_sweep_of_few_trials_says_what_importance_needs() -> None:
    with runs.create("sweep", "", "one") as run:
        record_sweep(run, 3)
    sections = search_sections.build_search_sections(runs.load("one"))
    assert [section.title for section in sections] == ["Trials", "Importance of the parameters", "All trials"]
    assert sections[1].note == "needs 8 trials with different scores"
    assert sections[2].rows[-1][:2] != ["0", "interrupted"]
    assert ["0", "interrupted"] in [row[:2] for row in sections[2].rows]
