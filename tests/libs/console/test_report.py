"""The report has what the console shows, in one file that loads nothing; the terminal has the same figures."""

import base64
import dataclasses
import json
import math
import re
import shutil
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

from chromium import Chromium
from console_rig import open_console
from shoal import runs
from shoal.cli.commands import cluster
from shoal.cli.display import run_view
from shoal.errors import RunError
from shoal.extend.runs import MUTED, Line, MetricHistory, Panel, draw_panels, is_logarithmic, read_curves, to_svg
from shoal.libs.console import report as report_page
from shoal.libs.console.report import list_learning_curves
from shoal.libs.console.run_data import MAX_PICTURE_BYTES, describe_panels
from shoal.runs import RunKind, RunRecorder, Status
from typed import draw_plain, said
from waiting import wait_for

PARTS = ("received", "consumed", "queued", "dropped")
EVIL = "<script>document.title='hostile'</script><!--"
TRAINING = {
    step: {"train/step": step, "train/epoch": step / 8, "train/loss": 1 / step, "wait/data": 0.125}
    | ({} if step % 8 else {"validation/loss": 2 / step, "validation/accuracy": step / 40})
    for step in range(1, 33)
}


@pytest.fixture(autouse=True)
def _quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    # Drawn in the same way, with a sixteenth of the dots: they take longer than all else in this file.
    monkeypatch.setattr(report_page, "to_png", partial(report_page.to_png, dots_per_inch=40))


def write(run_id: str = "one") -> dict[str, Any]:
    """The report's data, by the paths after the run's."""
    run = runs.load(run_id)
    path = runs.write_report(run)
    assert path == run.folder / "report.html"
    (data,) = re.findall(r'<script type="application/json" id="stored">(.*?)</script>', path.read_text(), re.DOTALL)
    stored: dict[str, Any] = json.loads(data)
    assert stored.pop("runs") == [run_id]
    return {name.removeprefix(f"/api/runs/{run_id}"): each for name, each in stored.items()}


def tabulate(stored: dict[str, Any]) -> dict[str, Any]:
    """What its panels have: counts by their names, or rows by their first cells."""
    found = {}
    for panel in stored["/panels"]["panels"]:
        counts = {name: text for name, _, text, _ in panel["counts"]}
        found[panel["title"]] = counts or {first: rest for first, *rest in panel["rows"]} or panel["commands"]
    return found


def record(values: dict[int, dict[str, float]], **options: Any) -> RunRecorder:
    recorder = runs.create("train", "", "one", **options)
    for step, each in values.items():
        recorder.log(step, each)
    return recorder


def test_a_full_run_is_told_in_full(shoal_home: Path) -> None:
    counts = {f"segments/{part}": count for part, count in zip(PARTS, (300.0, 240.0, 30.0, 30.0), strict=True)}
    values = {
        k: {"return/mean_100": 10.0 * k, "steps/total": 1000 * k, "learner/loss": 1.0 / k, "drops/stale": k - 1}
        for k in range(1, 31)
    }
    with runs.create("cartpole", "learner:\n  lr: 0.0123\n", "one", command="shoal run cartpole lr=<1>") as run:
        for step, each in values.items():
            run.log(step, {**each, **counts})
        run.record_endpoint("gateway", "gateway", "tcp://127.0.0.1:5600", "ready")
        run.record_model("cartpole", 3, ("champion", "candidate"))
        run.record_event("actor.joined", actor="actor-7", incarnation=2)
        run.record_event("staleness", updates=1_200, counts={"0": 400, "10": 800, "2": 1}, dropped=3, lost=5)
    (shoal_home / "runs/one/pictures").mkdir()
    (shoal_home / "runs/one/pictures/map.png").write_bytes(b"a picture")
    stored = write()
    assert (shoal_home / "runs/one/learning_curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    told, described = tabulate(stored), stored[""]
    assert described["fields"] == {"learner.lr": 0.0123}
    assert (described["status"], described["models"][0]["aliases"]) == ("finished", ["champion", "candidate"])
    assert described["endpoints"][0]["address"] == "tcp://127.0.0.1:5600"
    assert described["titles"]["learner/loss"] == "Learner loss"
    assert told["at a glance"] == {
        "best mean return": ["300"], "newest mean return": ["300"], "environment steps": ["30,000"]
    }  # fmt: skip
    assert told["segments"] == {"received": "300", "consumed": "240", "queued": "30", "dropped": "30"}
    assert told["drops"] == {"stale": "29"}
    assert list(told["staleness τ of the updates"].items()) == [("0", "400"), ("2", "1"), ("10", "800")]
    assert told["all metrics"]["learner/loss"] == ["0.03333", "0.03333", "1"]
    assert told["how to reproduce"][-1] == "shoal run cartpole lr=<1>"
    notes = {panel["title"]: panel["note"] for panel in stored["/panels"]["panels"]}
    assert notes["segments"] == "✓ received = consumed + queued + dropped"
    assert notes["staleness τ of the updates"] == "1,200 updates, 3 dropped, 5 lost"
    (pictures,) = [panel["pictures"] for panel in stored["/panels"]["panels"] if panel["pictures"]]
    assert pictures == [["map", f"data:image/png;base64,{base64.b64encode(b'a picture').decode()}"]]
    assert stored["/curves"]["curves"]["return/mean_100"]["values"][-1] == 300.0
    assert [each["details"].get("actor") for each in stored["/events"]][-2:] == ["actor-7", None]


def test_a_run_without_anything_still_has_a_page(shoal_home: Path) -> None:
    runs.create("nothing", "", "one").close()
    stored = write()
    assert stored[""]["status"] == "stopped"
    assert list(tabulate(stored)) == ["at a glance", "how to reproduce"]
    assert not (shoal_home / "runs/one/learning_curve.png").exists()


def test_all_who_show_a_run_have_the_same_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of an earlier attempt, which the gateway counts on."""
    monkeypatch.setattr(cluster, "find_cluster", lambda address: None)
    drops = {"drops/stale": 5.0, "drops/shutdown": 48.0, "drops/expired": 0.0}
    with runs.create("job", "", "one", kind=RunKind.LOOP) as run:
        run.log(1, {"actor_lag/lost": 9.0, "rejected/lost malformed": 7.0, "drops/shutdown": 48.0})
    with runs.reopen("one") as run:
        run.log(2, {**drops, "actors/connected": 2, "steps/total": 7, "actor_lag/a": 1.0, "rejected/b malformed": 3.0})
        run.flush()
        shown = draw_plain(run_view.make_view(runs.load("one"), None).render())
        status = json.loads(said("status --json"))["runs"][0]
        answered = tabulate({"/panels": open_console().get("/api/runs/one/panels").json()})
        stored = tabulate(write())
    for title in ("actors", "drops", "rejected"):
        assert answered[title] == stored[title]
        words = "  ".join(f"{name} {text}" for name, text in stored[title].items())
        assert words in shown, title
    assert stored["drops"] == {"shutdown": "48", "stale": "5"}
    assert (stored["actors"], stored["rejected"]) == ({"a": "1"}, {"b malformed": "3"})
    assert {name: f"{count}" for name, count in status["drops"].items() if count} == stored["drops"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({1: {"odd": 0.5, "never": math.nan}, 2: {"odd": math.nan, "never": math.nan}},
         {"odd": ["not a number", "0.5", "0.5"], "never": ["not a number", "-", "-"]}),
        ({1: {"huge": math.inf, "return": 1.0, "big": 1e300}, 2: {"huge": math.inf, "return": -math.inf}},
         {"huge": ["∞", "-", "-"], "return": ["-∞", "1", "1"], "big": ["1e300", "1e300", "1e300"]}),
    ],
)  # fmt: skip
def test_the_newest_value_is_told_also_where_it_is_no_number(
    values: dict[int, dict[str, float]], expected: dict[str, list[str]]
) -> None:
    record(values).close()
    assert tabulate(write())["all metrics"] == expected


def test_the_newest_numbers_are_the_newest_by_time_and_accounts_that_do_not_add_up_are_said_so() -> None:
    with record({900: dict.fromkeys((f"segments/{part}" for part in PARTS), 7.0) | {"odd": 1.0}}) as run:
        run.flush()
        (panel,) = [each for each in describe_panels(runs.load("one")) if each.title == "segments"]
        assert panel.note == "✗ received and consumed + queued + dropped differ by -14"
    with runs.reopen("one") as run:  # it went on from an earlier step
        run.log(500, {"odd": 2.0})
    assert tabulate(write())["all metrics"]["odd"] == ["2", "1", "2"]


def test_a_training_run_has_its_losses_and_what_it_is_judged_by() -> None:
    with record(TRAINING) as run:
        run.record_event("trained", reason="epochs", metrics={"accuracy": 0.6, "loss": 0.1})
        run.flush()
        seen = runs.load("one")
        loss, accuracy = list_learning_curves(seen, read_curves(seen))
        told = tabulate(write())
    assert [(line.label, len(line.xs)) for line in loss.lines] == [("training", 32), ("validation", 4)]
    assert (accuracy.title, accuracy.note) == ("validation/accuracy", "best 0.8")
    assert told["at a glance"] == {
        **{"best accuracy": ["0.8"], "registered accuracy": ["0.6"], "training steps": ["32"], "epochs": ["4"]},
        **{"waiting for data": ["12.5%"]},
    }
    assert told["a step"] == {"computing": "87.5%", "waits for data": "12.5%"}


def test_the_learning_curve_is_of_the_mean_return_and_a_resumed_run_is_marked() -> None:
    record({step: {"return/mean_100": step * 10.0} for step in range(1, 6)}).close()
    with runs.reopen("one") as run:
        run.log(6, {"evaluation/return": 900.0})
    seen = runs.load("one")
    steps, seconds = list_learning_curves(seen, read_curves(seen))
    assert (steps.title, steps.note, steps.lines[0].ys) == (
        "Mean return, last 100 episodes", "best 50", [10.0, 20.0, 30.0, 40.0, 50.0]
    )  # fmt: skip
    assert [label for _, label in seconds.marks] == ["resumed"]


def test_the_learning_curves_of_several_policies_are_their_mean_returns(shoal_home: Path) -> None:
    values = {
        k: {"hunters/self_play/return_mean": 9.0, "return/hunters": k / 5, "return/prey$x^$": -k} for k in range(5)
    }
    record(values).close()
    write()
    seen = runs.load("one")
    assert seen.best() == ("return/hunters", 0.8)
    titles = [panel.title for panel in list_learning_curves(seen, read_curves(seen))]
    assert titles == [f"Mean return, last 100 episodes: {policy}" for policy in ("hunters", "prey$x^$")]
    assert (shoal_home / "runs/one/learning_curve.png").exists()


@pytest.mark.usefixtures("drawn_report")
def test_a_report_that_cannot_be_written_ends_nothing(
    shoal_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = record({1: {"return": 1.0}})
    run.close()
    monkeypatch.setattr(report_page, "build_page", lambda run, curves: 1 / 0)
    runs.write_report_at_end("one")
    assert "report of run one could not be written: ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    monkeypatch.setenv("SHOAL_HOME", str(shoal_home))
    shutil.rmtree(run.folder)
    run.folder.touch()
    runs.write_report_at_end("one")
    assert "cannot be written to" in caplog.text
    with pytest.raises(RunError, match=r"report of run 'one' cannot be written to .*one: File exists"):
        runs.write_report(runs.load("one"))


def test_the_verb_writes_the_page_of_the_newest_run(shoal_home: Path) -> None:
    record({1: {"return": 1.0}}).close()
    shown = said("report --open-path")
    assert shown == f"{shoal_home / 'runs' / 'one' / 'report.html'}\n"
    assert Path(shown.strip()).exists()
    shown = said("report one")
    assert "report.html" in shown
    assert "Its learning curve: " in shown


def test_of_several_runs_the_page_has_them_over_each_other(shoal_home: Path, tmp_path: Path) -> None:
    for run_id in ("one", "two"):
        with runs.create("train", f"task: lenet\nworkers: {len(run_id)}\nname: {run_id}\n", run_id) as run:
            run.log(1, {"train/loss": 0.5})
    shown = said("report two one --open-path")
    with closing(Chromium(tmp_path)) as browser:
        browser.show(Path(shown.strip()).as_uri())
        wait_for(lambda: browser.run("document.querySelectorAll('canvas').length === 1"), what="the chart")
        text = browser.run("document.body.textContent")
    assert shown == f"{shoal_home / 'runs' / 'two' / 'comparison.html'}\n"
    for told in ("2 runs over each other", "■ two 0.5", "■ one 0.5", "name"):
        assert told in text, (told, text)


def test_the_first_the_middle_and_the_last_film_are_on_the_page() -> None:
    with record({}) as recorder:
        films = recorder.folder / "films"
    films.mkdir()
    for version in range(5):
        (films / f"v{version:06d}-e000001-r1-a.webp").write_bytes(f"film {version}".encode())
    (films / "v000009-e000001-r1-a.webp").write_bytes(b"0" * (MAX_PICTURE_BYTES + 1))
    (shown,) = [panel["pictures"] for panel in write()["/panels"]["panels"] if panel["title"] == "films"]
    assert [base64.b64decode(url.partition(",")[2]) for _, url in shown] == [b"film 0", b"film 2", b"film 4"]


def test_it_opens_without_a_server_and_what_a_run_says_is_no_script(tmp_path: Path) -> None:
    with runs.create(EVIL, json.dumps(EVIL), "one", command=EVIL) as run:
        for step in range(5):
            run.log(step, {f"return/{EVIL}": step, EVIL: 2.0, f"drops/{EVIL}": 3.0, "learner/loss": 1.0})
        run.record_event(EVIL, **{EVIL: EVIL})
        run.record_endpoint(EVIL, EVIL, EVIL, EVIL)
        run.record_model(EVIL, 1, (EVIL,))
        run.finish("failed", EVIL)
    lost = dataclasses.replace(runs.load("one"), status=Status.LOST)
    path = runs.write_report(lost)
    with closing(Chromium(tmp_path)) as browser:
        browser.show(path.as_uri())
        wait_for(lambda: browser.run("document.querySelectorAll('canvas').length === 4"), what="the charts")
        text = browser.run("document.body.textContent")
        loaded = browser.run("performance.getEntriesByType('resource').map((each) => each.name.slice(0, 5))")
        assert browser.run("document.title") == f"{EVIL} · one"
        assert browser.run("document.querySelectorAll('main script, main iframe, nav, main button.quiet').length") == 0
    assert set(loaded) <= {"data:"}
    for told in ("lost", "up to then everything is here", "Learner loss", "how to reproduce"):
        assert told in text, told
    assert text.count("hostile") > 10


def test_panels_are_drawn_in_one_style_with_words_as_they_are_and_steps_at_integers() -> None:
    line = Line("$loss$", [0.0, 1.0, 2.0], [1.0, None, 3.0])
    figure = draw_panels([Panel(title="$loss$", x="$step$", lines=[line], marks=[(1.0, "resumed")])], "$x^$")
    svg = to_svg(figure)  # ticks are made as they are drawn, after the figure was
    assert all(word in svg for word in ("$step$", "$loss$", "$x^$", ">resumed</text>"))
    (axes,) = figure.axes
    assert [side for side, spine in axes.spines.items() if spine.get_visible()] == ["bottom"]
    assert {to_hex(label.get_color()) for label in axes.get_xticklabels()} == {MUTED}
    assert not np.any(axes.get_xticks() % 1)
    huge = MetricHistory(np.arange(3), np.arange(3.0), np.array([1e308, math.inf, 1.0]))
    to_svg(draw_panels([Panel(title="huge", lines=[report_page._make_line(huge, "huge")])]))


def test_numbers_over_decades_are_drawn_over_their_logarithm() -> None:
    assert is_logarithmic([1e-4, 1e-2])
    assert not is_logarithmic([0.0, 1e-2])
    assert not is_logarithmic([0.1, 0.9, math.nan])
    assert not is_logarithmic([])
    assert not is_logarithmic([1e-4, 1e-2], "noise", {"rate"})  # uniform draws can be small
    assert is_logarithmic([0.1, 0.2], "rate", {"rate"})
