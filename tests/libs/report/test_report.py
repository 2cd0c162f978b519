"""The report tells what the record holds, whatever the run lacks, and needs nothing but itself to be read."""

from __future__ import annotations

import base64
import dataclasses
import math
import re
import shutil
import time
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.colors import to_hex

from shoal import runs
from shoal.errors import RunError
from shoal.extend.runs import MUTED, is_logarithmic, to_svg
from shoal.libs.report import page as report_page
from shoal.libs.report import plots
from shoal.libs.report.page import report
from shoal.libs.report.plots import Curve
from shoal.runs import Run, RunRecorder, Status

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
VOID = {"meta", "br", "img", "link", "input", "hr"}


@pytest.fixture(autouse=True)
def _quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    # Drawn in the same way, with a sixteenth of the dots: they take longer than all else in this file.
    monkeypatch.setattr(report_page, "to_png", partial(report_page.to_png, dots_per_inch=40))


class Page(HTMLParser):
    """The visible text of a page; asserts that elements are closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(self.source)
        assert self.open == []
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:  # self-contained: nothing is fetched, nothing runs
            assert name not in ("src", "onload", "onclick"), (tag, name, value)
            assert name not in ("href", "xlink:href") or (value or "").startswith("#"), (tag, name, value)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def write(run: Run) -> Page:
    path = runs.write_report(run)
    assert path == run.folder / "report.html"
    return Page(path)


def learn(run: RunRecorder, num_logs: int = 30) -> None:
    began_at = time.time()
    for k in range(1, num_logs + 1):
        values: dict[str, float] = {
            "return/mean_100": 10.0 * k,
            "steps/total": 1000 * k,
            "learner/loss": 1.0 / k,
            "segments/received": 10 * k,
            "segments/consumed": 8 * k,
            "segments/queued": k,
            "segments/dropped": k,
            "drops/stale": k - 1,
            "drops/duplicate": 1,
        }
        run.log(k, values)
        run.record_weights(k, k, "ab", began_at + k)


def test_a_full_run_is_told_in_full(shoal_home: Path) -> None:
    with runs.create("cartpole", "learner:\n  lr: 0.0123\n", "one", command="shoal run cartpole lr=<1>") as run:
        learn(run)
        run.record_endpoint("gateway", "gateway", "tcp://127.0.0.1:5600", "ready")
        run.record_model("cartpole", 3, ("champion", "candidate"))
        run.record_event("actor.joined", actor="actor-7", incarnation=2)
    page = write(runs.load("one"))
    assert (shoal_home / "runs/one/learning_curve.png").read_bytes().startswith(PNG_MAGIC)
    for told in (
        *("cartpole", "finished", "300", "best mean return", "30,000 environment steps"),
        *("✓ received = consumed + queued + dropped", "Drops by reason stale 29 duplicate 1"),
        *("Weight versions 30 published, 1 a second", "cartpole@3 champion candidate", "tcp://127.0.0.1:5600"),
        *("actor.joined actor actor-7 · incarnation 2", "lr: 0.0123", "shoal run cartpole lr=<1>", "Learner loss"),
    ):
        assert told in page.text, told
    assert page.source.count("<svg") == 4  # the curve over steps and over seconds, the loss, the versions
    assert "differ" not in page.text
    assert "steps" in page.text
    assert "<details open>" in page.source


def test_the_staleness_of_updates_is_drawn() -> None:
    with runs.create("train", "", "one") as run:
        run.record_event("staleness", updates=1_200, counts={"0": 400, "2": 800}, dropped=3, lost=5)
    page = write(runs.load("one"))
    assert "Staleness τ of the updates 1,200 updates, 3 dropped, 5 lost" in page.text
    assert "0 400 1 0 2 800" in page.text
    assert page.source.count('class="bar" style="width: 100.0%"') == 1


def test_accounting_that_does_not_add_up_is_said_so() -> None:
    parts = [f"segments/{part}" for part in ("received", "consumed", "queued", "dropped")]
    with runs.create("cartpole", "", "one") as run:
        run.log(1, dict(zip(parts, (300, 240, 30, 30), strict=True)))
        run.log(2, {"segments/received": 400})  # alone: the newest whole row still adds up
        run.flush()
        assert report_page.compute_accounting(runs.load("one").metrics()) == report_page.Accounting(300, 240, 30, 30)
        run.log(3, dict.fromkeys(parts, 7.0))
    page = write(runs.load("one"))
    assert "✗ received and consumed + queued + dropped differ by -14" in page.text


def test_a_run_without_anything_still_has_a_page(shoal_home: Path) -> None:
    runs.create("nothing", "", "one").close()
    page = write(runs.load("one"))
    assert "The run logged no metrics." in page.text
    assert "stopped" in page.text
    assert not (shoal_home / "runs/one/learning_curve.png").exists()
    for left_out in ("Drops", "Where the segments went", "Endpoints", "Registered models", "Events", "Weight versions"):
        assert left_out not in page.text


def test_lost_failed_and_running_runs_say_so() -> None:
    with runs.create("cartpole", "", "one") as run:
        run.log(1, {"drops/stale": 1.0})
        seen = runs.load("one")
        assert "The run goes on" in write(seen).text
        assert "its last sign of life" in write(dataclasses.replace(seen, status=Status.LOST)).text
        run.finish("failed", "ValueError: the loss is <nan>")
    assert "How it ended ValueError: the loss is <nan>" in write(runs.load("one")).text


def test_what_a_run_says_cannot_become_markup() -> None:
    evil = "<script>alert(1)</script>"
    with runs.create(evil, evil * 200, "one", command=evil) as run:
        run.log(1, {f"return/{evil}": 1.0, evil: 2.0, f"drops/{evil}": 3.0})
        run.record_event(evil, **{evil: evil})
        run.record_endpoint(evil, evil, evil, evil)
        run.record_model(evil, 1, (evil,))
        run.finish("failed", evil)
    page = write(runs.load("one"))
    assert "<script" not in page.source
    assert "<details>" in page.source
    assert page.text.count("alert(1)") >= 210


def test_unknown_metrics_get_small_plots_up_to_a_dozen() -> None:
    with runs.create("odd", "", "one") as run:
        for step in range(5):
            run.log(step, {f"odd/{number:02d}": float(step) for number in range(20)})
    page = write(runs.load("one"))
    assert page.source.count("<figcaption>") == report_page.MAX_SMALL_PLOTS == 12
    assert "odd/11" in page.text
    assert "odd/19 4 0 4" in page.text  # the rest are in the table


def test_values_that_are_not_finite_are_left_out_of_the_plots() -> None:
    with runs.create("odd", "", "one") as run:
        for step, value in enumerate((1.0, math.nan, math.inf, -math.inf, 2.0)):
            run.log(step, {"return/mean_100": value, "worst": math.nan, "huge": math.inf, "big": value * 1e300})
    page = write(runs.load("one"))
    assert "best mean return" in page.text
    assert "huge ∞ ∞ ∞" in page.text


def test_the_newest_value_is_told_also_where_it_is_no_number() -> None:
    with runs.create("odd", "", "one") as run:
        run.log(1, {"odd": 0.5, "never": math.nan})
        run.log(2, {"odd": math.nan, "never": math.nan})
    page = write(runs.load("one"))
    assert "odd not a number 0.5 0.5" in page.text
    assert "never not a number - -" in page.text
    assert re.search(r"<b>not a number</b></figcaption>", page.source)


@pytest.mark.parametrize("names", [("return$x^$",), ("train/loss", "validation/loss", "validation/accuracy$x^$")])
def test_names_are_drawn_as_they_are(names: tuple[str, ...]) -> None:
    with runs.create("$x^$", "") as run:
        for step in range(3):
            run.log(step, dict.fromkeys(names, float(step)))
    assert "$x^$" in write(runs.load(run.id)).text
    assert (runs.load(run.id).folder / "learning_curve.png").exists()


@pytest.mark.usefixtures("drawn_report")
def test_a_report_that_cannot_be_written_ends_nothing(
    shoal_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with runs.create("x", "", "one") as run:
        run.log(1, {"return": 1.0})
    monkeypatch.setattr(report_page, "_build_page", lambda run: 1 / 0)
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


def test_a_resumed_run_is_marked() -> None:
    with runs.create("cartpole", "", "one") as run:
        learn(run, 5)
    with runs.reopen("one") as run:
        learn(run, 8)
    page = write(runs.load("one"))
    assert page.source.count(">resumed</text>") == 1


def test_the_learning_curve_is_of_the_mean_return() -> None:
    with runs.create("cartpole", "", "one") as run:
        learn(run, 5)
        run.log(6, {"evaluation/return": 900.0})
    page = write(runs.load("one"))
    assert "Learning curve return/mean_100" in page.text
    assert "50 best mean return" in page.text
    assert "900 best" not in page.text


def test_the_learning_curves_of_several_policies_are_their_mean_returns() -> None:
    with runs.create("tag", "", "one") as run:
        for step in range(5):
            found = {"hunters/self_play/return_mean": 9.0, "return/hunters": step / 5, "return/prey": -step / 5}
            run.log(step, {**found, "steps/total": float(step)})
    page = write(runs.load("one"))
    assert runs.load("one").best() == ("return/hunters", 0.8)
    for policy in ("hunters", "prey"):
        assert f"Mean return, last 100 episodes: {policy}" in page.source
    assert (runs.load("one").folder / "learning_curve.png").exists()


def test_the_newest_numbers_are_the_newest_by_time() -> None:
    parts = [f"segments/{part}" for part in ("received", "consumed", "queued", "dropped")]
    with runs.create("cartpole", "", "one") as run:
        run.log(900, {**dict(zip(parts, (300, 240, 30, 30), strict=True)), "odd": 1.0})
        run.flush()
    with runs.reopen("one") as run:  # it went on from an earlier step
        run.log(500, {**dict(zip(parts, (400, 350, 20, 30), strict=True)), "odd": 2.0})
    seen = runs.load("one")
    assert report_page.compute_accounting(seen.metrics()) == report_page.Accounting(400, 350, 20, 30)
    assert "odd 2 1 2" in write(seen).text


def test_a_training_run_has_its_losses_and_what_it_is_judged_by() -> None:
    with runs.create("train", "", "one") as run:
        for step in range(1, 33):
            values = {"train/step": step, "train/epoch": step / 8, "train/loss": 1 / step, "wait/data": 0.125}
            run.log(step, {**values, "samples/per_s": 1000.0, "time/training_s": step * 0.1})
            if step % 8 == 0:
                run.log(step, {"validation/loss": 2 / step, "validation/accuracy": step / 40})
    seen = runs.load("one")
    assert seen.best() == ("validation/accuracy", 0.8)
    with runs.reopen("one") as run:
        run.record_event("trained", reason="epochs", metrics={"accuracy": 0.6, "loss": 0.1})
    page = write(seen)
    for told in (
        "0.8 best accuracy",
        "0.6 registered accuracy",
        "against steps",
        "32 training steps",
        "4 epochs",
        "12.5% waiting for data",
    ):
        assert told in page.text, told
    drawn = re.findall(r"<svg.*?</svg>", page.source, re.DOTALL)
    assert all(f">{word}</text>" in drawn[0] for word in ("loss", "training", "validation"))
    assert ">validation/accuracy</text>" in drawn[1]
    captions = re.findall(r'<figcaption><span title="([^"]*)"', page.source)
    assert captions == ["samples/per_s", "wait/data"]  # no empty panel, and nothing twice


def test_a_thinned_curve_keeps_its_spikes_and_its_order() -> None:
    x = np.arange(100_000.0)
    y = np.sin(x / 1000)
    y[54_321], y[77_777] = 50.0, -50.0
    thin = Curve.from_points(x, y).downsample(1000)
    assert len(thin.x) <= 1000
    assert (np.diff(thin.x) > 0).all()
    assert {50.0, -50.0} <= set(thin.y)
    assert (thin.y == y[thin.x.astype(int)]).all()
    short = Curve.from_points([3.0, 1.0, math.nan, 2.0], [30.0, 10.0, 1.0, math.inf])
    assert (short.x.tolist(), short.y.tolist()) == ([1.0, 3.0], [10.0, 30.0])


def test_the_verb_writes_the_page_of_the_newest_run(shoal_home: Path) -> None:
    with runs.create("cartpole", "", "one") as run:
        learn(run, 5)
    shown = CliRunner().invoke(report, ["--open-path"], catch_exceptions=False).stdout
    assert shown == f"{shoal_home / 'runs' / 'one' / 'report.html'}\n"
    assert Path(shown.strip()).exists()
    shown = CliRunner().invoke(report, ["one"], catch_exceptions=False).stdout
    assert "report.html" in shown
    assert "Its learning curve: " in shown


def test_the_first_the_middle_and_the_last_film_are_on_the_page(shoal_home: Path) -> None:
    with runs.recording("", "job", begun="started", kind=runs.RunKind.LOOP, run_id="filmed") as recorder:
        films = recorder.folder / "films"
    films.mkdir()
    for version in range(5):
        (films / f"v{version:06d}-e000001-r1-a.webp").write_bytes(f"film {version}".encode())
    (films / "v000009-e000001-r1-a.webp").write_bytes(b"0" * (report_page.MAX_PICTURE_BYTES + 1))
    text = report_page.write_page(runs.load("filmed")).read_text()
    found = re.findall(r'src="data:image/webp;base64,([^"]+)"', text)
    assert [base64.b64decode(each) for each in found] == [b"film 0", b"film 2", b"film 4"]


@pytest.mark.parametrize("last", [1, 2, 6, 10, 12])
def test_steps_and_versions_have_whole_ticks(last: int) -> None:
    curve = Curve.from_points(range(last + 1), range(last + 1))
    figures = [
        plots.draw_curves("", [plots.Panel("loss", "step", [("train", curve)], more_is_better)])
        for more_is_better in (None, True)
    ]
    figures += [plots.draw_small_plot(curve, 0.0, float(last))]
    wide = plots.draw_wide_plot(Curve.from_points(np.linspace(0, 1, last + 1), range(last + 1)))
    for axis in (*(figure.axes[0].xaxis for figure in figures), wide.axes[0].yaxis):
        ticks = axis.get_ticklocs()
        assert len(ticks) > 1
        assert not np.any(ticks % 1)
    if last == 2:
        assert np.any(wide.axes[0].get_xticks() % 1)  # seconds


def test_pictures_have_one_style() -> None:
    """Also where ticks are made as they are drawn, after the figure was."""
    curve = Curve.from_points([0.0, 1.0, 2.0], [1.0, 2.0, 3.0])
    for figure in (
        plots.draw_curves("", [plots.Panel("$loss$", "$step$", [("train", curve)], True)]),
        plots.draw_small_plot(curve, 0.0, 2.0),
        plots.draw_wide_plot(curve),
    ):
        to_svg(figure)
        for axes in figure.axes:
            assert [side for side, spine in axes.spines.items() if spine.get_visible()] == ["bottom"]
            assert {to_hex(label.get_color()) for label in axes.get_xticklabels()} == {MUTED}
    assert "$step$" in to_svg(plots.draw_curves("", [plots.Panel("$loss$", "$step$", [("train", curve)], True)]))


def test_numbers_over_decades_are_drawn_over_their_logarithm() -> None:
    assert is_logarithmic([1e-4, 1e-2])
    assert not is_logarithmic([0.0, 1e-2])
    assert not is_logarithmic([0.1, 0.9, math.nan])
    assert not is_logarithmic([])
    assert not is_logarithmic([1e-4, 1e-2], "noise", {"rate"})  # uniform draws can be small
    assert is_logarithmic([0.1, 0.2], "rate", {"rate"})
