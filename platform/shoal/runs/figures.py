"""How panels are drawn by matplotlib, which no other module imports: a PNG, and what the charts of a page cannot draw.

No figure is one of pyplot's, so that a caller's pyplot is unchanged.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.errors import needs_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shoal.runs.panels import Panel

MAX_HEADING_LENGTH = 44  # that fits into a panel
MIN_LINE = 3  # points: fewer are marked
MAX_DRAWN_VALUE = 1e300  # axes extend beyond their values, and must be finite themselves
LOG_RATIO = 50.0  # between the ends of positive numbers that are drawn over their logarithm

INK = "#111827"
MUTED = "#6b7280"
RULE = "#d1d5db"
GRID = "#eef0f3"
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
LINE, MARK = COLOURS[:2]
_TONES = {"muted": RULE, "busy": LINE}
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


def is_logarithmic(values: Sequence[float] | np.ndarray, name: str = "", named: Collection[str] | None = None) -> bool:
    """Whether numbers are drawn over their logarithm: all are positive, and the name is among the named ones.

    named: None: the largest number is 50 times the smallest
    """
    finite = np.asarray(values, float)
    finite = finite[np.isfinite(finite)]
    if not len(finite) or finite.min() <= 0:
        return False
    return bool(finite.max() / finite.min() >= LOG_RATIO) if named is None else name in named


def draw_panels(panels: Sequence[Panel], title: str = "", size_inches: tuple[float, float] = (5.4, 3.5)) -> Figure:
    """The lines of panels side by side, with their marks. Words are drawn as written, `$` too. size_inches: of each"""
    with needs_extra("report"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure

    count, (width, height) = len(panels), size_inches
    with rc_context(_STYLE):
        figure = Figure(figsize=(width * count, height))
        figure.subplots_adjust(left=0.1 / count, bottom=0.525 / height, top=1 - 0.63 / height, wspace=0.16)
        for axes, panel in zip(figure.subplots(1, count, squeeze=False)[0], panels, strict=True):
            from matplotlib.ticker import EngFormatter

            for number, line in enumerate(panel.lines):
                colour = _TONES.get(line.tone, COLOURS[number % len(COLOURS)])
                ys = [value if value is not None and abs(value) <= MAX_DRAWN_VALUE else math.nan for value in line.ys]
                marker = "o" if line.tone == "points" or sum(map(math.isfinite, ys)) < MIN_LINE else ""
                style = " " if line.tone == "points" else "-"
                axes.plot(
                    line.xs, ys, style, color=colour, label=line.label, linewidth=1.5, marker=marker, markersize=4
                )
            for number, (at, label) in enumerate(panel.marks):
                axes.axvline(at, color=MARK, linewidth=1, linestyle=(0, (3, 3)), zorder=1)
                axes.annotate(label, (at, 0.02 + 0.07 * number), (3, 0), xycoords=("data", "axes fraction"), color=MARK,
                              textcoords="offset points", fontsize=8)  # fmt: skip
            if len(panel.lines) > 1:
                axes.legend()
            for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
                low, high = axis.get_view_interval()
                if name in panel.scale:
                    axes.set(**{f"{name}scale": "log"})
                    axis.set_major_formatter("{x:g}")
                elif 10_000 <= max(abs(low), abs(high)) < 1e15:
                    axis.set_major_formatter(EngFormatter(sep=""))
            if "x" not in panel.scale and not any(x % 1 for line in panel.lines for x in line.xs):
                axes.locator_params(axis="x", integer=True)  # there is no step, round or version between two
            axes.set_xlabel(panel.x)
            axes.set_title(
                truncate_middle(f"{panel.title}{f': {panel.note}' if panel.note else ''}", MAX_HEADING_LENGTH), pad=12
            )
        words = truncate_middle(title, MAX_HEADING_LENGTH * count)
        figure.text(0.985, 0.955, words, color=MUTED, ha="right")  # above the headings, in a line of its own
    return figure


def truncate_middle(text: str, most: int) -> str:
    """Shorten `text` to its beginning and end when it exceeds `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[len(text) - (most - most // 2 - 1) :]}"


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
