"""The pictures of runs, and the style of every picture of the package (`make_figure`).

Takes columns of numbers and returns a matplotlib figure, or SVG for a page; never reads the record. No figure is one of
pyplot's, so that a caller's pyplot is unchanged.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shoal.errors import needs_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import Series

MAX_POINTS = 1500
MAX_HEADING_LENGTH, MAX_TITLE_LENGTH = 44, 60  # that fit into a panel
LOG_RATIO = 50.0  # between the ends of positive numbers that are drawn over their logarithm
MAX_DRAWN_VALUE = 1e300  # axes extend beyond their values, and must be finite themselves

INK, MUTED, RULE, GRID = "#111827", "#6b7280", "#d1d5db", "#eef0f3"
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
LINE, MARK = COLOURS[:2]
WIDTH_INCHES = 10.8  # across the page
_STYLE: dict[str, Any] = {
    **{"svg.fonttype": "none", "svg.hashsalt": "shoal", "font.size": 9.0, "text.parse_math": False},
    **{"figure.facecolor": "white", "figure.subplot.right": 0.985, "figure.subplot.top": 0.95},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "axes.edgecolor": RULE},
    **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 1},
    **{"axes.labelcolor": MUTED, "axes.titlelocation": "left", "axes.titlecolor": INK, "axes.titlesize": 10},
    **{"axes.titleweight": "bold", "axes.xmargin": 0.01, "axes.ymargin": 0.08},
    **{"figure.constrained_layout.w_pad": 0.1, "legend.frameon": False, "legend.fontsize": 8, "legend.labelcolor": INK},
    **{f"{axis}tick.{field}": value for axis in "xy" for field, value in (("color", MUTED), ("minor.size", 0))},
    **{f"{axis}tick.major.{field}": value for axis in "xy" for field, value in (("size", 0), ("pad", 4))},
}


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


@contextmanager
def make_figure(
    size_inches: tuple[float, float], *, layout: Literal["constrained"] | None = None, **margins: float
) -> Iterator[Figure]:
    """An empty figure, and the style of all pictures while the body draws into it. Words are drawn as written, `$` too.

    margins: of `Figure.subplots_adjust`, where there is no layout
    """
    with needs_extra("report"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=size_inches, layout=layout)
        if layout is None:
            figure.subplots_adjust(**margins)
        yield figure


def is_logarithmic(values: Sequence[float] | np.ndarray, name: str = "", named: Collection[str] | None = None) -> bool:
    """Whether numbers are drawn over their logarithm: all are positive, and the name is among the named ones.

    named: None: the largest number is 50 times the smallest
    """
    finite = np.asarray(values, float)
    finite = finite[np.isfinite(finite)]
    if not len(finite) or finite.min() <= 0:
        return False
    return bool(finite.max() / finite.min() >= LOG_RATIO) if named is None else name in named


def to_numbers(column: Series[Any]) -> tuple[np.ndarray, list[str]]:
    """Numbers as they are; other values as their number among the distinct ones, which are the second result."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in column):
        return column.to_numpy(float), []
    names = [str(value) for value in column]
    distinct = sorted(set(names))
    return np.array([distinct.index(name) for name in names], float), distinct


def use_integer_ticks(axes: Axes, axis: Literal["x", "y"] = "x") -> None:
    """Ticks at integers alone: there is no step, round or version between two."""
    axes.locator_params(axis=axis, integer=True)


def add_heading(axes: Axes, text: str, most: int = MAX_HEADING_LENGTH, **options: Any) -> None:
    """A text above the panel, shortened to what fits."""
    axes.set_title(truncate_middle(text, most), **options)


def mark_moment(axes: Axes, x: float, label: str) -> None:
    """A dashed line with a label beside it."""
    axes.axvline(x, color=MARK, linewidth=1, linestyle=(0, (3, 3)), zorder=1)
    axes.annotate(label, (x, 0.02), (3, 0), xycoords=("data", "axes fraction"), color=MARK,
                  textcoords="offset points", fontsize=8)  # fmt: skip


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


def truncate_middle(text: str, most: int) -> str:
    """Shorten `text` to its beginning and end when it exceeds `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[len(text) - (most - most // 2 - 1) :]}"


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


def to_svg(figure: Figure) -> str:
    """The figure as an SVG element, text as text; the page gives the font."""
    text = _save(figure, "svg", metadata={"Date": None}).decode()
    return text[text.index("<svg") :]


def to_png(figure: Figure, dots_per_inch: int = 160) -> bytes:
    """The figure as a PNG file."""
    return _save(figure, "png", dpi=dots_per_inch)


def _save(figure: Figure, file_format: str, **options: Any) -> bytes:
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context(_STYLE):  # ticks are made when they are drawn
        figure.savefig(buffer, format=file_format, **options)
    return buffer.getvalue()


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
        f"• best {y:.4g}", (0.985, 0.05 if more_is_better else 0.93), xycoords="axes fraction", ha="right",
        va="bottom" if more_is_better else "top", color=INK,
    )  # fmt: skip
