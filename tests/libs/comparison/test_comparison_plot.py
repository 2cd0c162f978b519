"""The picture of a comparison: its words are whole, lie beside each other, and say what is not known."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from shoal import runs
from shoal.libs.comparison.columns import Column, build_column, plot_comparison


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))


def columns(*logged: dict[str, float]) -> list[Column]:
    for number, values in enumerate(logged):
        with runs.create("train", "", f"run-{number}") as run:
            run.log(1, values)
    return [build_column(runs.load(f"run-{number}"), None) for number in range(len(logged))]


def test_no_word_of_the_picture_is_cut_or_lies_over_another() -> None:
    compared = columns({"validation/loss": 1.0}, {"validation/loss": 2.0})
    compared[0].values["memory_peak"] = compared[1].values["memory_peak"] = 1e6
    figure = plot_comparison(compared, ["20261120-064501-3f2a a_job_of_a_long_name_" * 4, "$x^$"])
    figure.draw_without_rendering()
    headings = [axes._left_title.get_window_extent() for axes in figure.axes]
    names = [text.get_window_extent() for text in figure.axes[0].get_legend().get_texts()]
    for box in (*headings, *names):
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width
    assert not any(one.overlaps(other) for one, other in itertools.combinations(headings, 2))


def test_what_is_not_known_of_a_run_is_no_zero() -> None:
    compared = columns({"validation/loss": 1.0}, {"validation/loss": 2.0})
    compared[1].values["memory_peak"] = 1e6
    compared[0].values.pop("memory_peak", None)
    labels = [text.get_text() for text in plot_comparison(compared, ["a", "b"]).axes[-1].texts]
    assert labels == ["-", "976.6 KiB"]


def test_runs_without_a_curve_have_no_axes_of_nothing() -> None:
    (axes, *_) = plot_comparison(columns({"odd": math.nan}, {"odd": math.nan}), ["a", "b"]).axes
    assert [text.get_text() for text in axes.texts] == ["no run has logged what it could be judged by"]
    assert not axes.get_xticks().size
