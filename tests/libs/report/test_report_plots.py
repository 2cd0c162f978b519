"""The axes of a report's pictures."""

from __future__ import annotations

import math

import numpy as np
import pytest
from matplotlib.colors import to_hex

from shoal.extend.runs import MUTED, is_logarithmic, to_svg
from shoal.libs.report import plots
from shoal.libs.report.plots import Curve


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
