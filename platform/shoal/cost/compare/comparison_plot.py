"""The plot of a comparison: learning curves over the running time, and a bar for each run and quantity.

Called by `shoal compare`. Takes columns and returns a matplotlib figure; never reads the record.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.cost.compare.comparison import ROWS, Column
from shoal.cost.cost_table import format_quantity
from shoal.runs.formatting import format_number
from shoal.runs.report.plots import COLOURS, add_heading, make_figure, truncate_middle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_NAME_CHARS, MAX_METRIC_CHARS, MAX_BAR_CHARS = 44, 60, 26  # that fit into a panel's line
_BARS = ("lived_s", "money", "memory_peak", "sent_bytes", "communication")


def plot_comparison(columns: Sequence[Column], names: Sequence[str]) -> Figure:
    """The curves on the left, a panel of bars for each quantity that some run knows. `names` label the runs."""
    bars = [name for name in _BARS if any(column.values.get(name) for column in columns)]
    with make_figure((5.0 + 2.4 * len(bars), 3.6), layout="constrained") as figure:
        panels = figure.subplots(1, 1 + len(bars), width_ratios=[2.4, *[1.0] * len(bars)], squeeze=False)[0]
        _plot_curves(panels[0], columns, names)
        for panel, name in zip(panels[1:], bars, strict=True):
            _plot_bars(panel, columns, name)
    return figure


def _plot_curves(axes: Axes, columns: Sequence[Column], names: Sequence[str]) -> None:
    for index, (column, name) in enumerate(zip(columns, names, strict=True)):
        seconds, values = column.curve
        marker = "o" if len(seconds) == 1 else ""
        axes.plot(seconds, values, color=COLOURS[index % len(COLOURS)], linewidth=1.6, marker=marker)
        axes.lines[-1].set_label(truncate_middle(name, MAX_NAME_CHARS))
    metric = next((column.headline[0] for column in columns if column.headline), "")
    axes.set_xlabel("seconds lived")
    add_heading(axes, metric, MAX_METRIC_CHARS)
    axes.legend()
    if not any(len(column.curve[0]) for column in columns):
        axes.set(xticks=[], yticks=[])
        axes.text(0.02, 0.02, "no run has logged what it could be judged by", fontsize=8, transform=axes.transAxes)


def _plot_bars(axes: Axes, columns: Sequence[Column], name: str) -> None:
    values = [column.values.get(name, math.nan) for column in columns]
    places = range(len(values))
    drawn = axes.bar(
        places,
        [value if math.isfinite(value) else 0.0 for value in values],
        color=[COLOURS[index % len(COLOURS)] for index in places],
    )
    unit, meaning = ROWS[name]
    axes.bar_label(
        drawn, [format_value(value, unit) if math.isfinite(value) else "-" for value in values], fontsize=7.5
    )
    axes.set_title(textwrap.fill(meaning, MAX_BAR_CHARS))
    axes.set_xticks([])
    axes.set_yticks([])
    axes.margins(y=0.12)


def format_value(value: float, unit: str) -> str:
    """A value of ROWS, for people."""
    return format_number(value) if unit in ("rate", "money", "count") else format_quantity(value, unit)
