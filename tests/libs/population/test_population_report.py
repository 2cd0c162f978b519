"""What is shown of a population: on a terminal, in a log file, in the pictures of its report."""

import dataclasses
import math
from typing import Any

import pytest

from shoal import runs
from shoal.cli.display import run_view
from shoal.extend.runs import Panel
from shoal.libs.population.display import PopulationView, make_view
from shoal.libs.population.report import build_panels
from shoal.libs.population.spec import PopulationSpec
from shoal.runs import RunKind
from shoal.runs.run_kind import infer_kind
from typed import draw_plain


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


def build(metric: str = "accuracy", spec: str = "", rounds: list[dict[str, Any]] = ROUNDS) -> list[Panel]:
    with runs.create("population", spec, "one", kind=RunKind.POPULATION) as run:
        record_population(run, rounds, metric)
    return build_panels(runs.load("one"))


def test_a_population_has_its_members_genealogy_and_schedules() -> None:
    members, genealogy, schedule, table = build()
    assert "2 copies in 3 rounds; in blue the ancestors of member 1 after round 2, the best" in genealogy.note
    assert genealogy.pictures[0][1].startswith("data:image/svg+xml;base64,")
    assert [(line.label, list(line.ys), line.tone) for line in members.lines] == [
        ("0", [0.1, 0.4, 0.5], "muted"),
        ("1", [0.2, 0.7, 0.6], "muted"),
        ("2", [0.3, None, 0.55], "muted"),
        ("the best", [0.2, 0.7, None], "busy"),
    ]
    assert (schedule.title, schedule.scale) == ("schedule of optimizer.learning_rate", "y")
    assert [list(line.ys) for line in schedule.lines[2:]] == [[0.001, 0.001, 0.02], [0.01, 0.01, None]]
    assert table.header == ["member", "accuracy", "learning rate", "copied"]
    assert [row[0] for row in table.rows] == ["1", "2", "0"]
    assert table.rows[0][1:3] == [("0.6", "best"), "0.01"]


def test_the_spec_of_a_population_says_what_it_is() -> None:
    assert infer_kind(PopulationSpec(task="lenet").to_yaml()) is RunKind.POPULATION


@pytest.mark.parametrize(("space", "scale"), [("log(1e-3, 1)", "y"), ("uniform(0, 1)", "")])
def test_the_scales_are_those_of_the_space(space: str, scale: str) -> None:
    assert build(spec=f"space: {{optimizer.learning_rate: '{space}', act: [a, b]}}")[2].scale == scale


def test_the_best_has_the_lowest_score_where_less_is_better() -> None:
    assert "member 0 after round 1" in build("loss")[0].note


def test_a_population_without_a_score_and_other_runs_have_no_such_panels() -> None:
    assert build(rounds=[ROUNDS[0] | {"scores": [None, None, None]}]) == []
    runs.create("train", "", "two").close()
    assert build_panels(runs.load("two")) == []


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
    return draw_plain(view.render(), width)


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


def test_a_line_names_the_best_member_and_its_values() -> None:
    line = VIEW.format_plain_line()
    for word in ("round 7 of 20", "best accuracy 0.78 of member 28", "learning rate 0.0125", "1,300 member-steps/s"):
        assert word in line, word


def test_a_plain_line_is_printed_when_it_has_news(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(run_view.time, "monotonic", lambda: now[0])
    lines = run_view.LineThrottle()
    assert lines.format_if_due(VIEW) == VIEW.format_plain_line()
    later = dataclasses.replace(VIEW, elapsed_s=133.0)
    now[0] += 6.0
    assert lines.format_if_due(later) is None  # only time has passed
    now[0] += 6.0
    assert lines.format_if_due(later) == later.format_plain_line()  # but much of it
    now[0] += 6.0
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
