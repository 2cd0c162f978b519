"""What `shoal run` shows of a run, on a terminal and in a log file."""

import dataclasses
import json
import math
from dataclasses import replace

import pytest
from rich.progress_bar import ProgressBar
from rich.text import Text

from shoal import runs
from shoal.cli.commands import cluster
from shoal.cli.display import rl_display, run_view
from shoal.cli.display.panels import format_sparkline
from shoal.cli.display.rl_display import LoopView, make_view
from shoal.flows.rl_metrics import select_rejections
from typed import draw_plain, said

METRICS = {
    "return/mean_100": 123.4,
    "steps/per_s": 5678.0,
    "steps/total": 98_765.0,
    "episodes/total": 432.0,
    "weights/version": 77.0,
    "queue/depth": 13.0,
    "endpoint/requests_per_s": 21.0,
    "actors/connected": 2.0,
    "lag/max": 15.0,
    "actor_lag/actor-0": 1.0,
    "actor_lag/actor-1": 15.0,
    "drops/stale": 6.0,
    "drops/duplicate": 3.0,
    "drops/corrupt": 0.0,
}
VIEW = LoopView(
    run_id="one",
    phase="learning",
    elapsed_s=12.3,
    target_return=475.0,
    metrics=METRICS,
    history=(20.0, 60.0, 123.4),
    lowest=20.0,
    endpoint="http://h:8000",
    gateway="tcp://h:5600",
    notes=("a note",),
)


def drawn(view: LoopView, width: int = 140) -> str:
    return draw_plain(view.render(), width)


def bars(view: LoopView, monkeypatch: pytest.MonkeyPatch) -> float:
    """How full the progress bar is."""
    made: list[float] = []

    def spy(total: float, completed: float, width: int) -> ProgressBar:
        made.append(completed / total)
        return ProgressBar(total=total, completed=completed, width=width)

    monkeypatch.setattr(rl_display, "ProgressBar", spy)
    drawn(view)
    [full] = made
    return full


def test_the_picture_tells_everything() -> None:
    text = drawn(VIEW)
    for told in (
        *("one  learning  12 s", "return     123.4", "475", "steps/s 5,678", "steps 98,765", "episodes 432"),
        *("weights 77", "queue 13", "endpoint req/s 21", "2 connected", "actor-0 1", "actor-1 15"),
        *("stale 6  duplicate 3", "http://h:8000", "tcp://h:5600", "a note"),
    ):
        assert told in text, (told, text)
    assert "corrupt" not in text  # what did not happen is not listed


def test_of_several_policies_each_has_its_return() -> None:
    others = {name: value for name, value in METRICS.items() if name != "return/mean_100"}
    view = replace(VIEW, metrics=others | {"return/hunters": 0.5, "return/prey": -0.125})
    assert "│ returns   hunters 0.5   prey -0.125 " in drawn(view)
    assert "return of hunters 0.5, return of prey -0.125, steps/s 5,678" in view.format_plain_line()


def test_the_indicators_of_the_learner_are_shown_and_bad_ones_stand_out() -> None:
    indicators = {"learner/policy_lag": 31.0, "learner/entropy": 0.42, "learner/explained_variance": -0.25}
    view = replace(VIEW, metrics=METRICS | indicators)
    assert "learner   policy lag 31  entropy 0.42  explained variance -0.25" in drawn(view)
    (line,) = [each for each in view.list_panels() if isinstance(each, Text) and each.plain.startswith("learner")]
    bad = {line.plain[each.start : each.end] for each in line.spans if each.style == "bold yellow"}
    assert bad == {"31", "-0.25"}
    assert "learner" not in drawn(VIEW)


def test_episodes_have_their_spread_and_success() -> None:
    spread = {"return_std": 12.5, "return_min": 0.03, "return_max": 200.0, "length": 20.25, "length_std": 3.0}
    view = replace(VIEW, metrics=METRICS | {f"episode/{name}": value for name, value in spread.items()})
    assert "episodes  return ± 12.5 (0.03 to 200), length 20.25 ± 3 " in drawn(view)
    view = replace(view, metrics=view.metrics | {"return/best_actions": 480.0, "return/trial": 470.0})
    assert "by best actions 480 " in drawn(view)
    view = replace(VIEW, metrics={**view.metrics, "episode/success_rate": 0.25, "learner/q_value": 1.5})
    assert "learner   Q 1.5" in drawn(view)
    assert "return 123.4, by best actions 480, length 20.25 ± 3, success 25%, steps/s" in view.format_plain_line()


@pytest.mark.parametrize("width", [50, 80, 140])
def test_a_sparkline_ends_with_the_newest_value_however_narrow_the_terminal(width: int) -> None:
    text = drawn(dataclasses.replace(VIEW, history=(*[20.0] * 119, 475.0)), width)
    (line,) = [line for line in text.splitlines() if "return" in line]
    assert line.rstrip(" │").endswith("█")
    assert "…" not in text


@pytest.mark.parametrize("width", [40, 80])
def test_lines_are_wrapped_on_a_console_that_wraps_no_other(width: int) -> None:
    reasons = {f"drops/{word}_{number}": 1.0 for word in ("stale", "corrupt", "invalid") for number in range(8)}
    view = dataclasses.replace(VIEW, metrics=METRICS | reasons, notes=("note " * 30,))
    text = draw_plain(run_view.render(view, width), width, soft_wrap=True)
    assert max(len(line) for line in text.splitlines()) == width - 2
    told = " ".join(text.replace("│", "").split())
    assert told.count("note") == 30
    for reason in reasons:
        assert f"{reason.removeprefix('drops/')} 1" in told


def test_who_sends_only_bad_messages_is_shown_with_reason_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the picture, in the line, and in `shoal status`."""
    monkeypatch.setattr(cluster, "find_cluster", lambda address: None)
    actors = [
        {"actor_id": "looper", "invalid": {"malformed": 1320}},
        {"actor_id": "good", "invalid": {}},
        {"actor_id": "one two", "invalid": {"non_finite": 2}},
    ]
    with runs.create("job", "", "one", kind=runs.RunKind.LOOP) as run:
        run.record_event("gateway_ready")
        run.log(
            7, {"actors/connected": 3, "steps/total": 7, "drops/non_finite": 2, "drops/expired": 0, "drops/shutdown": 1}
        )
        run.log_group(7, "rejected", select_rejections({"actors": actors}))
        run.flush()
        view = run_view.make_view(runs.load("one"), None)
        shown = said("status")
        found = json.loads(said("status --json"))["runs"][0]
    assert isinstance(view, LoopView)
    assert "rejected  looper malformed 1,320  one two non_finite 2" in drawn(view)
    assert "drops     non_finite 2  shutdown 1 " in drawn(view)
    assert "drops 3, rejected 1322" in view.format_plain_line()
    assert "    3 actors, 7 steps, drops: non_finite 2, shutdown 1\n" in shown  # of an earlier attempt
    assert "    rejected: looper malformed 1,320, one two non_finite 2\n" in shown
    assert (found["actors"], found["rejected"]) == (3, {"looper malformed": 1320, "one two non_finite": 2})


def test_a_run_without_an_environment_says_what_it_waits_for_and_who_has_brought_its_spaces() -> None:
    with runs.create("job", "env: ask", "one", kind=runs.RunKind.LOOP) as run:
        run.record_event("spaces_asked", addresses=["tcp://h:1", "ws://h:2"])
        run.flush()
        waits = run_view.make_view(runs.load("one"), None)
        assert "waiting for a game that brings its spaces, at tcp://h:1 or ws://h:2" in waits.format_plain_line()
        run.record_event("spaces_taken", actor_id="catch-1", spaces="{}")
        run.change_spec("env: '{\"action\": 3}'")
        run.flush()
        view = run_view.make_view(runs.load("one"), waits)
        run.record_event("solved")
        run.flush()
        assert run_view.make_view(runs.load("one"), view).phase == "solved; registering the policy"
    assert view.phase == "starting the endpoint"
    assert 'spaces    {"action": 3}, brought by catch-1' in drawn(view)
    shown = said("runs one")
    assert 'spaces    {"action": 3}, brought by catch-1' in shown


@pytest.mark.parametrize(
    ("target", "history", "full"),
    [
        (475.0, (), 0.0),
        (475.0, (95.0,), 0.2),
        (475.0, (20.0, 500.0), 1.0),
        (100.0, (-300.0, -100.0), 0.5),  # as far as from the lowest to the target
        (-100.0, (-500.0,), 0.0),
        (-100.0, (-500.0, -300.0), 0.5),
        (-100.0, (-500.0, -90.0), 1.0),
        (-100.0, (-50.0,), 1.0),  # better than the target from the first moment
        (-100.0, (), 0.0),
        (0.0, (-10.0, -5.0), 0.5),
    ],
)
def test_the_bar_goes_from_the_lowest_return_to_the_target(
    target: float, history: tuple[float, ...], full: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = {"return/mean_100": history[-1]} if history else {}
    view = replace(VIEW, target_return=target, metrics=metrics, history=history, lowest=math.inf)
    assert bars(view, monkeypatch) == pytest.approx(full)


def test_the_line_tells_everything() -> None:
    facts = "return 123.4, steps/s 5,678, weights 77, max lag 15, queue 13, drops 9, endpoint requests/s 21"
    assert VIEW.format_plain_line() == f"[ 12.3 s] learning: {facts}"


@pytest.mark.parametrize(
    ("values", "low", "high", "expected"),
    [
        ((), None, None, ""),
        ((5.0,), None, None, "█"),
        ((0.0,), None, None, "▁"),
        ((-5.0,), None, None, "▁"),
        ((0.0, 5.0, 10.0), None, None, "▁▅█"),
        ((5.0, 10.0), None, 10.0, "▅█"),  # the scale begins at 0
        ((-500.0, -300.0, -100.0), None, None, "▁▅█"),
        ((-500.0, -100.0), None, 0.0, "▁▇"),
        ((-500.0, -100.0, 20.0), -500.0, -100.0, "▁██"),  # above the scale
        ((3.0, 3.0), 3.0, 3.0, "▁▁"),
    ],
)
def test_a_sparkline_is_scaled(values: tuple[float, ...], low: float | None, high: float | None, expected: str) -> None:
    assert format_sparkline(values, 40, low, high) == expected


def test_a_long_sparkline_is_thinned_to_its_width() -> None:
    line = format_sparkline([float(k % 100 == 50) for k in range(1000)], 40)
    assert len(line) <= 40
    assert line.count("█") == 10  # no peak is lost


def test_the_history_has_every_new_finite_mean_and_its_lowest() -> None:
    view = None
    with runs.create("job", "", "one") as run:
        run.record_endpoint("policy", "inference", "http://h:8000", "ready")
        run.record_endpoint("gateway", "gateway", "tcp://h:5600", "closed")
        for step, mean in enumerate((math.nan, -500.0, -500.0, math.nan, -300.0)):
            run.log(step, {"return/mean_100": mean})
            run.flush()
            view = make_view(runs.load("one"), view, ["a note"])
    assert (view.history, view.lowest) == ((-500.0, -300.0), -500.0)
    assert (view.endpoint, view.gateway, view.notes) == ("http://h:8000", "", ("a note",))
