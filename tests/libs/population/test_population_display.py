"""What `shoal run` shows of a population, on a terminal and in a log file."""

from __future__ import annotations

import dataclasses
import io
import math

import pytest
from rich.console import Console

from shoal import runs
from shoal.cli.display import run_view
from shoal.libs.population.display import PopulationView, make_view
from shoal.runs import RunKind

SETTING = {
    **{"members": 30, "rounds": 20, "total_steps": 3000, "metric": "accuracy", "is_higher_better": True},
    **{"device": "cpu", "parameters": 61_706},
}
SCORES = [0.5 + member / 100 for member in range(30)]
SCORES[29] = None  # type: ignore[call-overload]
LAST = {
    "round": 7,
    "scores": SCORES,
    "hyper_parameters": {"optimizer.learning_rate": [0.01] * 28 + [0.0125, 9.0], "augmentation.shift": [1.5] * 30},
    "ancestors": [[]] * 27 + [[[2, 4], [3, 11], [6, 5]], [[6, -1]], []],
}
VIEW = PopulationView(
    run_id="20261120-101010-abcd",
    phase="evolving",
    elapsed_s=73.0,
    metrics={"train/step": 1050.0, "population/member_steps_per_s": 1300.0, "validation/accuracy": 0.78},
    setting=SETTING,
    last=LAST,
    engine={"name": "lanes", "chunk": 16},
    history=(0.6, 0.7, 0.78),
)


def shown(view: PopulationView, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(view.render())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_has_the_best_members_with_values_and_lineage(width: int) -> None:
    text = shown(VIEW, width)
    for word in (
        *("20261120-101010-abcd", "evolving", "73 s", "of 20", "1,300 member-steps/s", "45.0 s to go"),
        *("30 of 61,706 parameters", "lanes, up to 16 at once, on cpu", "learning rate", "shift"),
        *("0.78", "0.0125", "new weights in round 6", "11 in round 3, 5 in round 6", "and 15 more"),
    ):
        assert word in text, word
    rows = [line.split() for line in text.splitlines()]
    numbers = [int(row[1]) for row in rows if len(row) > 2 and row[1].isdigit()]
    assert numbers == list(range(28, 13, -1))  # the best first, and those without a score not among them
    assert {len(line) for line in text.splitlines()} == {width}


def test_less_is_better_where_the_metric_says_so() -> None:
    view = dataclasses.replace(VIEW, setting={**SETTING, "metric": "loss", "is_higher_better": False})
    assert view.rank_members()[:2] == [0, 1]
    assert view.rank_members()[-1] == 29


def test_a_line_names_the_best_member_and_its_values() -> None:
    line = VIEW.format_plain_line()
    for word in ("round 7 of 20", "best accuracy 0.78 of member 28", "learning rate 0.0125", "1,300 member-steps/s"):
        assert word in line, word


def test_a_plain_line_is_printed_when_it_has_news(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(run_view.time, "monotonic", lambda: now[0])
    lines = run_view.LineThrottle()
    assert lines.format_if_due(VIEW) == VIEW.format_plain_line()
    now[0] += 60.0
    assert lines.format_if_due(dataclasses.replace(VIEW, elapsed_s=133.0)) is None  # only time has passed
    metrics = {**VIEW.metrics, "train/step": 1100.0}
    assert "step 1,100" in str(lines.format_if_due(dataclasses.replace(VIEW, metrics=metrics)))
    metrics["train/step"], now[0] = 1150.0, now[0] + 1.9
    assert lines.format_if_due(dataclasses.replace(VIEW, metrics=metrics)) is None  # too soon
    assert "registering" in str(lines.format_if_due(dataclasses.replace(VIEW, phase="registering")))


def test_before_the_first_report_there_is_only_the_phase() -> None:
    view = PopulationView(run_id="id", phase="choosing an engine", elapsed_s=1.0)
    assert view.format_plain_line() == "[  1.0 s] choosing an engine"
    assert math.isnan(view.remaining_s)
    assert "choosing an engine" in shown(view)


def test_a_view_is_read_from_the_record() -> None:
    with runs.create("population", "task: lenet\nmembers: 3", kind=RunKind.POPULATION) as recorder:
        recorder.record_event("population", **SETTING, step=0)
        before = make_view(runs.load(recorder.id), None, [])
        recorder.log(1050, VIEW.metrics)
        recorder.record_event("engine", name="lanes", chunk=16)
        recorder.record_event("round", **LAST)
        view = run_view.make_view(runs.load(recorder.id), before)
    assert isinstance(view, PopulationView)
    assert (view.last["round"], view.setting["members"], view.history) == (7, 30, (0.78,))
    assert run_view.make_view(runs.load(recorder.id), view).history == (0.78,)  # type: ignore[union-attr]
    assert "lanes" in shown(view)
