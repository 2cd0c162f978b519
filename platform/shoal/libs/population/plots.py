"""The pictures of a population: who descends from whom, the schedules that were found, the metric of each member.

Takes data frames and returns matplotlib figures; never reads the record. In all of them the best member's line of
descent is blue, the other members are grey.

A frame of stretches has a row for each stretch of training, with the columns member, begin, end and source (NaN: it
began with new weights), and one for each hyper-parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.extend.runs import (
    LINE,
    MUTED,
    RULE,
    WIDTH_INCHES,
    add_heading,
    is_logarithmic,
    make_figure,
    use_integer_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame, Series

MAX_LABELLED_MEMBERS = 40
LINK_LENGTH = 0.5  # of a copy, in rounds
SURVIVOR = "#9ca3af"


def draw_genealogy(stretches: DataFrame, survivors: DataFrame, ancestry: DataFrame) -> Figure:
    """Members over rounds: a line for each stretch of training, a link for each copy, a dot for new weights.

    stretches: all of them, in light grey
    survivors: those whose training the last members have in their weights, in dark grey
    ancestry:  those of the best member, in blue
    """
    num_members = int(stretches["member"].max()) + 1
    height = min(1.2 + 0.17 * num_members, 8.0)
    with make_figure((WIDTH_INCHES, height), left=0.05, bottom=max(0.08, 0.5 / height), top=0.97) as figure:
        axes = figure.add_subplot()
        axes.grid(visible=False)
        _draw_descent(axes, stretches, RULE, 0.8)
        _draw_descent(axes, survivors, SURVIVOR, 1.3)
        _draw_descent(axes, ancestry, LINE, 2.4)
        axes.set_ylim(num_members - 0.3, -0.7)
        _label_rounds(axes)
        axes.set_ylabel("member")
        every = -(-num_members // MAX_LABELLED_MEMBERS)
        axes.set_yticks(range(0, num_members, every))
    return figure


def draw_schedules(
    stretches: DataFrame, ancestry: DataFrame, paths: Sequence[str], logarithmic: Collection[str] | None = None
) -> Figure:
    """One panel for each hyper-parameter: its value in each round, of all members and of the best one's ancestors.

    stretches: of all members
    ancestry:  of the best one
    logarithmic: the hyper-parameters that are drawn over their logarithm; None: see `is_logarithmic`
    """
    num_rows = -(-len(paths) // 2)
    height = 2.7 * num_rows
    with make_figure(
        (WIDTH_INCHES, height), left=0.07, bottom=0.5 / height, top=1 - 0.3 / height, hspace=0.6
    ) as figure:
        for number, path in enumerate(paths, start=1):
            axes = figure.add_subplot(num_rows, 2, number)
            values = stretches[path].to_numpy(float)
            _draw_steps(axes, stretches, values, RULE, 1.0)
            _draw_steps(axes, ancestry, ancestry[path].to_numpy(float), LINE, 2.2)
            if is_logarithmic(values, path, logarithmic):
                axes.set_yscale("log")
                axes.minorticks_off()
                axes.yaxis.set_major_formatter("{x:g}")
            _label_rounds(axes)
            add_heading(axes, path)
    return figure


def draw_member_metric(scores: DataFrame, best: Series[Any], metric: str) -> Figure:
    """A metric of all members over rounds, and the best one's ancestors.

    scores: index round, a column for each member
    best:   index round: what the best member's ancestor, and at the end itself, had
    """
    with make_figure((WIDTH_INCHES, 3.2), left=0.07, bottom=0.16, top=0.87) as figure:
        axes = figure.add_subplot()
        for member in scores.columns:
            axes.plot(scores.index, scores[member], color=RULE, linewidth=1)
        axes.plot(scores.index, scores.median(axis=1), color=MUTED, linewidth=1.2, linestyle=(0, (4, 2)))
        axes.plot(best.index, best, color=LINE, linewidth=2.2, marker="o", markersize=3)
        _label_rounds(axes)
        add_heading(axes, metric)
    return figure


def _draw_descent(axes: Axes, stretches: DataFrame, colour: str, width: float) -> None:
    """Lines of training at the member's height, and the links to the members that were copied."""
    from matplotlib.collections import LineCollection

    lines, dots = [], []
    columns = (stretches[name].tolist() for name in ("member", "begin", "end", "source"))
    for member, begin, end, source in zip(*columns, strict=True):
        is_new = source is None or source != source
        start = begin + (0.0 if is_new or source == member else min(LINK_LENGTH, end - begin))
        lines.append([(start, member), (end, member)])
        if is_new:
            dots.append((start, member))
        elif source != member:
            lines.append([(begin, source), (start, member)])
    axes.add_collection(LineCollection(lines, colors=colour, linewidths=width, capstyle="round"))
    axes.plot(*np.array(dots, float).reshape(-1, 2).T, "o", color=colour, markersize=width + 2)


def _draw_steps(axes: Axes, stretches: DataFrame, values: np.ndarray, colour: str, width: float) -> None:
    """The value of each stretch over its rounds, those of one line joined."""
    from matplotlib.collections import LineCollection

    begins, ends = stretches["begin"].to_numpy(float), stretches["end"].to_numpy(float)
    lines = [[(begin, value), (end, value)] for begin, end, value in zip(begins, ends, values, strict=True)]
    if colour == LINE:
        pairs = zip(begins[1:], values[:-1], values[1:], strict=True)
        lines += [[(begin, before), (begin, after)] for begin, before, after in pairs]
    axes.add_collection(LineCollection(lines, colors=colour, linewidths=width, capstyle="round"))
    axes.autoscale_view()


def _label_rounds(axes: Axes) -> None:
    axes.set_xlabel("round")
    use_integer_ticks(axes)
