"""The pictures of runs: learning curves, the small plots of a report, and curves in one panel; the style of all.

Takes columns of numbers and returns a matplotlib figure, or SVG for a page; never reads the record. Uses figures of
its own, so that a caller's pyplot is unchanged.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shoal.errors import needs_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS = 1500
MAX_HEADING_LENGTH, MAX_TITLE_LENGTH = 44, 60  # that fit into a panel
MAX_DRAWN_VALUE = 1e300  # axes extend beyond their values, and must be finite themselves

INK, MUTED, RULE, GRID = "#111827", "#6b7280", "#d1d5db", "#eef0f3"
LINE, MARK = "#2563eb", "#d97706"
FONT_SIZE = 9.0
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "shoal", "font.size": FONT_SIZE, "axes.unicode_minus": True}


@dataclass(frozen=True)
class Curve:
    """Points in logged order: x and y have the same length and are finite."""

    x: np.ndarray
    y: np.ndarray

    @classmethod
    def from_points(cls, x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> Curve:
        """Drop values that are not finite or beyond MAX_DRAWN_VALUE, and sort by x."""
        x_all, y_all = np.asarray(x, float), np.asarray(y, float)
        kept = (np.abs(x_all) <= MAX_DRAWN_VALUE) & (np.abs(y_all) <= MAX_DRAWN_VALUE)
        order = np.argsort(x_all[kept], kind="stable")
        return cls(x_all[kept][order], y_all[kept][order])

    def downsample(self, max_points: int = MAX_POINTS) -> Curve:
        """At most `max_points`, keeping the lowest and highest of each stretch, so that no spike is hidden."""
        num_buckets = max_points // 2
        if len(self.x) <= max_points:
            return self
        size = -(-len(self.x) // num_buckets)
        starts = range(0, len(self.y), size)
        kept = {start + int(pick(self.y[start : start + size])) for start in starts for pick in (np.argmin, np.argmax)}
        indices = sorted(kept)
        return Curve(self.x[indices], self.y[indices])


@contextmanager
def make_figure(
    size_inches: tuple[float, float], *, font_size: float = FONT_SIZE, layout: Literal["constrained"] | None = None
) -> Iterator[Figure]:
    """An empty figure, and the style of all pictures while the body draws into it."""
    with needs_extra("report"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure

    with rc_context({**_STYLE, "font.size": font_size}):
        yield Figure(figsize=size_inches, facecolor="white", layout=layout)


def hide_spines(axes: Axes, *sides: str) -> None:
    """Draw no line on these sides of the panel."""
    for side in sides:
        axes.spines[side].set_visible(False)


def add_legend(axes: Axes, **options: Any) -> None:
    """The names of the curves as they are written, `$` too."""
    for text in axes.legend(frameon=False, **options).get_texts():
        text.set_parse_math(False)


def draw_learning_curve(
    title: str, metric: str, panels: Sequence[tuple[str, Curve]], marks_s: Sequence[float], more_is_better: bool
) -> Figure:
    """One panel for each way of counting progress, side by side.

    panels:  (label of the x axis, curve) each; the last one is in wall seconds
    marks_s: when the run was resumed, drawn into the last panel
    """
    with make_figure((5.4 * len(panels), 3.5)) as figure:
        for axes, (label, curve) in zip(_add_panels(figure, len(panels)), panels, strict=True):
            _draw(axes, curve, width=1.7)
            _mark_best(axes, curve, more_is_better)
            axes.set_xlabel(label, color=MUTED)
        for mark_s in marks_s:
            axes.axvline(mark_s, color=MARK, linewidth=1, linestyle=(0, (3, 3)), zorder=1)
            axes.annotate("resumed", (mark_s, 0.02), (3, 0), xycoords=("data", "axes fraction"), color=MARK,
                          textcoords="offset points", fontsize=8)  # fmt: skip
        words = truncate_middle(metric, MAX_HEADING_LENGTH)
        figure.text(0.1 / len(panels), 0.88, words, color=INK, fontsize=11, fontweight="bold", parse_math=False)
        _draw_title(figure, title, len(panels))
    return figure


@dataclass(frozen=True)
class Panel:
    """Curves over one way of counting progress: `x` names it, and each curve has a name."""

    heading: str
    x: str
    curves: Sequence[tuple[str, Curve]]


def draw_training_curves(title: str, panels: Sequence[Panel]) -> Figure:
    """The panels side by side. The first curve of each is a line, the others have a mark at each point as well."""
    with make_figure((5.4 * len(panels), 3.5)) as figure:
        for axes, panel in zip(_add_panels(figure, len(panels)), panels, strict=True):
            for index, (name, curve) in enumerate(panel.curves):
                _draw(axes, curve, width=1.7 if index else 1.2, colour=(LINE, MARK)[index % 2])
                axes.lines[-1].set(label=name, marker="o" if index or len(curve.x) < 2 else "", markersize=4)
            if len(panel.curves) > 1:
                add_legend(axes, labelcolor=INK)
            axes.set_xlabel(panel.x, color=MUTED)
            words = truncate_middle(panel.heading, MAX_HEADING_LENGTH)
            heading = axes.set_title(words, loc="left", color=INK, fontsize=11, fontweight="bold", pad=12)
            heading.set_parse_math(False)
        _draw_title(figure, title, len(panels))
    return figure


def _add_panels(figure: Figure, num_panels: int) -> list[Axes]:
    figure.subplots_adjust(left=0.1 / num_panels, right=0.985, bottom=0.15, top=0.82, wspace=0.16)
    return [figure.add_subplot(1, num_panels, number) for number in range(1, num_panels + 1)]


def truncate_middle(words: str, most: int) -> str:
    """Shorten `words` to their beginning and end when they exceed `most` characters."""
    return words if len(words) <= most else f"{words[: most // 2]}…{words[len(words) - (most - most // 2 - 1) :]}"


def _draw_title(figure: Figure, title: str, num_panels: int) -> None:
    """Draw it above the headings, in a line of its own."""
    words = truncate_middle(title, MAX_TITLE_LENGTH * num_panels)
    figure.text(0.985, 0.955, words, color=MUTED, fontsize=9, ha="right", parse_math=False)


def draw_small_plot(curve: Curve, begin: float, end: float) -> Figure:
    """A plot for a grid of many, all from `begin` to `end`: no labels, for the page names it."""
    with make_figure((3.5, 1.7)) as figure:
        figure.subplots_adjust(left=0.16, right=0.97, bottom=0.14, top=0.95)
        axes = figure.add_subplot()
        _draw(axes, curve, width=1.2)
        margin = 0.01 * (end - begin)
        axes.set_xlim(begin - margin, end + margin)
        axes.locator_params(nbins=4)
        axes.tick_params(labelsize=7.5)
    return figure


def draw_wide_plot(curve: Curve) -> Figure:
    """Stairs of versions across the page."""
    with make_figure((10.8, 1.9)) as figure:
        figure.subplots_adjust(left=0.05, right=0.985, bottom=0.22, top=0.95)
        axes = figure.add_subplot()
        _draw(axes, curve, width=1.5, drawstyle="steps-post")
        axes.set_xlabel("wall time (s)", color=MUTED)
        axes.locator_params(axis="y", nbins=5, integer=True)
    return figure


def to_svg(figure: Figure) -> str:
    """The figure as an SVG element, text as text; the page gives the font."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def to_png(figure: Figure, dots_per_inch: int = 160) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dots_per_inch)
    return buffer.getvalue()


def _draw(axes: Axes, curve: Curve, width: float, drawstyle: str = "default", colour: str = LINE) -> None:
    from matplotlib.ticker import EngFormatter

    thin = curve.downsample()
    single = "o" if len(thin.x) == 1 else ""
    axes.plot(
        thin.x, thin.y, color=colour, linewidth=width, solid_joinstyle="round", drawstyle=drawstyle, marker=single
    )
    hide_spines(axes, "top", "right", "left")
    axes.spines["bottom"].set_color(RULE)
    axes.tick_params(colors=MUTED, length=0, pad=4)
    axes.grid(axis="y", color=GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.margins(x=0.01, y=0.08)
    if not np.any(thin.x % 1):  # steps: there is none between two
        axes.locator_params(axis="x", integer=True)
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
        va="bottom" if more_is_better else "top", color=INK, fontsize=9,
    )  # fmt: skip
