"""The front of a search: quality against cost, with the chosen model, in the style of the report's pictures."""

from __future__ import annotations

from typing import Any

from shoal.libs.optimise.choice import find_front, is_within
from shoal.libs.optimise.request import OptimiseRequest
from shoal.libs.optimise.search import Outcome
from shoal.runs.report.plots import INK, LINE, MARK, MUTED, RULE, make_figure, to_png

_COSTS = {
    "latency": ("milliseconds for one sample", 1e3),
    "batch": ("milliseconds for a batch of {batch}", 1e3),
    "size": ("MiB on disk", 2.0**-20),
    "flops": ("MFLOP for one sample", 1e-6),
}


def plot_front(found: Outcome, request: OptimiseRequest) -> bytes:
    """A PNG: each model as a point, the front as a line, the limit of the drop as a dashed one."""
    label, scale = _COSTS[request.cost]
    front = find_front(found.measured, found.metric, found.is_higher_better, request.cost)
    points = [(each.get_cost(request.cost) * scale, each.metrics[found.metric]) for each in found.measured]
    with make_figure((7.2, 4.2), layout="constrained") as figure:
        title = f"{found.teacher.ref}: {found.metric} against {label.format(batch=request.batch)}"
        figure.suptitle(title, color=INK, fontsize=10, fontweight="bold", x=0.01, ha="left")
        axes = figure.subplots()
        axes.grid(axis="x")
        axes.margins(x=0.12, y=0.12)
        axes.plot([points[each][0] for each in front], [points[each][1] for each in front], color=RULE, linewidth=1.5)
        axes.axhline(found.limit, color=MUTED, linewidth=1, linestyle=(0, (3, 3)), zorder=0)
        for position, index in enumerate(sorted(range(len(points)), key=points.__getitem__)):
            cost, quality = points[index]
            fits = is_within(quality, found.limit, found.is_higher_better)
            colour = MARK if index == found.chosen else LINE if fits else MUTED
            axes.plot(cost, quality, "o", color=colour, markersize=8 if index == found.chosen else 5)
            offset = (5, 5 - 13 * (position % 2))  # alternately above and below, since the cheapest are close
            text: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7, "color": colour}
            axes.annotate(found.models[index].title, (cost, quality), offset, **text)
        axes.set_xscale("log")
        for formatter in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            formatter("{x:g}")
        axes.set_xlabel(label.format(batch=request.batch))
        axes.set_ylabel(found.metric)
    return to_png(figure)
