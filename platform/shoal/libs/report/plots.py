"""The pictures of the report: curves over steps or time.

Takes columns of numbers and returns a matplotlib figure; never reads the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.extend.runs import (
    COLOURS,
    INK,
    LINE,
    MUTED,
    WIDTH_INCHES,
    add_heading,
    format_number,
    make_figure,
    mark_moment,
    truncate_middle,
    use_integer_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS = 1500
MAX_TITLE_LENGTH = 60  # that fits above a panel
MAX_DRAWN_VALUE = 1e300  # axes extend beyond their values, and must be finite themselves


@dataclass(frozen=True)
class Curve:
    """Points in logged order: x and y have the same length and are finite."""

    x: np.ndarray
    y: np.ndarray

    @classmethod
    def from_points(cls, x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> Curve:
        """Drop values that are not finite or beyond MAX_DRAWN_VALUE, and sort by x."""
        x_all, y_all = np.asarray(x, float), np.asarray(y, float)
        is_drawn = (np.abs(x_all) <= MAX_DRAWN_VALUE) & (np.abs(y_all) <= MAX_DRAWN_VALUE)
        order = np.argsort(x_all[is_drawn], kind="stable")
        return cls(x_all[is_drawn][order], y_all[is_drawn][order])

    def downsample(self, max_points: int = MAX_POINTS) -> Curve:
        """At most `max_points`, keeping the lowest and highest of each stretch, so that no spike is hidden."""
        num_buckets = max_points // 2
        if len(self.x) <= max_points:
            return self
        size = -(-len(self.x) // num_buckets)
        starts = range(0, len(self.y), size)
        extremes = {
            start + int(pick(self.y[start : start + size])) for start in starts for pick in (np.argmin, np.argmax)
        }
        indices = sorted(extremes)
        return Curve(self.x[indices], self.y[indices])


@dataclass(frozen=True)
class Panel:
    """Curves over one way of counting progress, `x`; each curve has a name.

    more_is_better: marks the best value of the first curve; None: of no curve
    marks_s:        when the run was resumed, where `x` is in seconds
    """

    heading: str
    x: str
    curves: Sequence[tuple[str, Curve]]
    more_is_better: bool | None = None
    marks_s: Sequence[float] = ()


def draw_curves(title: str, panels: Sequence[Panel]) -> Figure:
    """The panels side by side. Curves after the first have a mark at each point."""
    count, heading = len(panels), ""
    with make_figure((5.4 * count, 3.5), left=0.1 / count, bottom=0.15, top=0.82, wspace=0.16) as figure:
        for axes, panel in zip(figure.subplots(1, count, squeeze=False)[0], panels, strict=True):
            for index, (name, curve) in enumerate(panel.curves):
                width = 1.2 if index == 0 and panel.more_is_better is None else 1.7
                _draw(axes, curve, linewidth=width, colour=COLOURS[index % 2], label=name, has_marks=index > 0)
            if len(panel.curves) > 1:
                axes.legend()
            if panel.more_is_better is not None:
                _mark_best(axes, panel.curves[0][1], panel.more_is_better)
            axes.set_xlabel(panel.x)
            if panel.heading != heading:  # else that of the panel before is meant
                add_heading(axes, panel.heading, pad=12)
            heading = panel.heading
            for mark_s in panel.marks_s:
                mark_moment(axes, mark_s, "resumed")
        words = truncate_middle(title, MAX_TITLE_LENGTH * count)
        figure.text(0.985, 0.955, words, color=MUTED, ha="right")  # above the headings, in a line of its own
    return figure


def draw_small_plot(curve: Curve, begin: float, end: float) -> Figure:
    """A plot for a grid of many, all from `begin` to `end`: no labels, for the page names it."""
    with make_figure((3.5, 1.7), left=0.16, right=0.97, bottom=0.14) as figure:
        axes = figure.add_subplot()
        _draw(axes, curve, linewidth=1.2)
        margin = 0.01 * (end - begin)
        axes.set_xlim(begin - margin, end + margin)
        axes.locator_params(nbins=4)
        axes.tick_params(labelsize=7.5)
    return figure


def draw_wide_plot(curve: Curve) -> Figure:
    """Stairs of versions across the page."""
    with make_figure((WIDTH_INCHES, 1.9), left=0.05, bottom=0.22) as figure:
        axes = figure.add_subplot()
        _draw(axes, curve, linewidth=1.5, drawstyle="steps-post")
        axes.set_xlabel("wall time (s)")
        axes.locator_params(axis="y", nbins=5)
        use_integer_ticks(axes, "y")
    return figure


def _draw(axes: Axes, curve: Curve, *, has_marks: bool = False, colour: str = LINE, **options: Any) -> None:
    from matplotlib.ticker import EngFormatter

    thin = curve.downsample()
    marker = "o" if has_marks or len(thin.x) < 2 else ""
    axes.plot(thin.x, thin.y, color=colour, marker=marker, markersize=4, **options)
    if not np.any(thin.x % 1):  # steps
        use_integer_ticks(axes)
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        if 10_000 <= max(abs(low), abs(high)) < 1e15:
            axis.set_major_formatter(EngFormatter(sep=""))


def _mark_best(axes: Axes, curve: Curve, more_is_better: bool) -> None:
    best = int(np.argmax(curve.y) if more_is_better else np.argmin(curve.y))
    x, y = curve.x[best], curve.y[best]
    axes.plot([x], [y], "o", color=LINE, markersize=5, markeredgecolor="white", markeredgewidth=1.2, zorder=5)
    axes.annotate(
        f"• best {format_number(y)}", (0.985, 0.05 if more_is_better else 0.93), xycoords="axes fraction", ha="right",
        va="bottom" if more_is_better else "top", color=INK,
    )  # fmt: skip
