"""Runs side by side: their results, duration and cost. Reads only the run record.

Called by `shoal compare`. Works for any run: unrecorded values are omitted from its column.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from shoal.extend.cost import MEASURED, PREDICTED, CostTable, format_quantity
from shoal.extend.runs import (
    COLOURS,
    VALIDATION,
    Run,
    RunKind,
    add_heading,
    format_number,
    is_higher_better,
    make_figure,
    truncate_middle,
)
from shoal.libs.comparison.curves import AXES, Axis, MetricCurve, build_curves, sort_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

_S_PER_HOUR = 3600.0
# The rows of a comparison besides results: name -> (unit, meaning). `events` supply values that metrics lack.
ROWS = {
    "steps": ("count", "steps"),
    "lived_s": ("seconds", "wall time, starts and evaluations included"),
    "training_s": ("seconds", "of it, in training steps"),
    "money": ("money", "cost of all of it"),
    "samples_per_s": ("rate", "samples a second"),
    "step_s": ("seconds", "a step"),
    "data_wait": ("share", "waiting for data"),
    "communication": ("share", "waiting for other ranks"),
    "utilisation": ("share", "of the device's arithmetic in use"),
    "memory_peak": ("bytes", "peak memory of a rank"),
    "flops_step": ("operations", "FLOPs of a step"),
    "sent_bytes": ("bytes", "a rank sends, each step"),
    "bubble": ("share", "pipeline bubble"),
    "parameters": ("count", "parameters"),
}
STEP_S, TRAINING_S = "step/seconds", "time/training_s"
# Metric names of these rows: the mean over the training time.
_METRIC_NAMES = {
    "samples_per_s": ("samples/per_s", "steps/per_s"),
    "data_wait": ("wait/data",),
    "communication": ("wait/communication",),
    "utilisation": ("flops/utilisation",),
}


@dataclass(frozen=True)
class Column:
    """One run.

    headline:  its headline metric, and the best value
    plan:      all its plans, in order
    values:    by the names in ROWS; only known ones
    predicted: the names of values that were predicted, and not measured
    curves:    of all its metrics
    """

    run: Run
    plan: str
    workers: int | None
    price_per_device_hour: float
    headline: tuple[str, float] | None
    values: dict[str, float]
    predicted: frozenset[str] = frozenset()
    curves: Mapping[str, MetricCurve] = field(default_factory=dict)


def build_column(run: Run, metric: str | None = None, by: Axis = "time") -> Column:
    """The column of the run; `metric` is to be compared, the run's own headline when None; curves are over `by`."""
    spec = yaml.safe_load(run.spec)
    spec = spec if isinstance(spec, dict) else {}
    last = run.last_events()
    metrics = run.metrics()
    lives = find_attempt_spans(run, metrics)
    lived_s = sum(end - begin for begin, end in lives)
    default = 1 if run.kind is RunKind.TRAINING else None
    workers = _as_int(last.get("training", {}).get("workers", spec.get("workers", default)))
    price = float(spec.get("price_per_device_hour") or 0.0)
    predicted, measured = (CostTable.from_details(last.get(kind, {})).values for kind in (PREDICTED, MEASURED))
    values = {name: value for name, value in (predicted | measured).items() if name in ROWS}
    only_predicted = frozenset(values) - measured.keys() - {"parameters"}  # parameters are counted exactly
    rates = _measure_rates(metrics)
    values |= rates
    values["lived_s"] = lived_s
    if len(metrics):
        values["steps"] = float(metrics.index.max())
    events = run.events()
    began = events[events["kind"] == "training"]
    if price and workers:
        spent_s = sum((end - begin) * _find_num_workers(began, begin, workers) for begin, end in lives)
        values["money"] = price * spent_s / _S_PER_HOUR
    headline = _find_best(metrics, metric) if metric else run.best()
    plans = ", ".join(dict.fromkeys(str(each.get("plan", "-")) for each in began["details"])) or "-"
    return Column(
        run, plans, workers, price, headline, values, only_predicted - rates.keys(), build_curves(run, by, lives)
    )


def _measure_rates(metrics: DataFrame) -> dict[str, float]:
    """The means over the run of what a report has for the time since the last one.

    A run that does not report the seconds of a step has reports at equal intervals.
    """
    spent_s, values = metrics["time"] * 0.0 + 1.0, dict[str, float]()
    if STEP_S in metrics:
        mean_s = metrics[STEP_S].dropna()
        num_steps = np.diff(mean_s.index, prepend=0)
        spent_s = mean_s * num_steps
        values |= {"training_s": float(spent_s.sum()), "step_s": float(spent_s.sum() / num_steps.sum())}
    if TRAINING_S in metrics:
        values["training_s"] = float(metrics[TRAINING_S].max())
    for row, names in _METRIC_NAMES.items():
        if (name := next((each for each in names if each in metrics), None)) is not None:
            known = metrics[name].reindex(spent_s.index).dropna()
            values[row] = float((known * spent_s[known.index]).sum() / spent_s[known.index].sum())
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _find_num_workers(began: DataFrame, attempt_began_s: float, otherwise: int) -> int:
    """The number of workers in the attempt that began at a moment, or in the next one that reported it."""
    since = began[began["time"] >= attempt_began_s]
    return _as_int(since["details"].iloc[0].get("workers")) or otherwise if len(since) else otherwise


def find_attempt_spans(run: Run, metrics: DataFrame) -> list[tuple[float, float]]:
    """The running times, in seconds since the run was created: from each start to the last event before the next
    one."""
    events = run.events()
    resumed = [float(at) for at in events["time"][events["kind"] == "resumed"]]
    signs = [*map(float, events["time"]), *map(float, metrics["time"])]
    lives, begin = [], 0.0
    for at in resumed:
        lives.append((begin, max((sign for sign in signs if begin <= sign < at), default=begin)))
        begin = at
    return [*lives, (begin, max(run.duration_s, begin))]


def find_common_metric(runs: list[Run]) -> str | None:
    """The headline metric of most of the runs; the first run's if none is common."""
    names = [best[0] for best in (run.best() for run in runs) if best is not None]
    return max(names, key=names.count) if names else None


def _find_best(metrics: DataFrame, name: str) -> tuple[str, float] | None:
    if name not in metrics:
        return None
    known = metrics[name].dropna()
    if not len(known):
        return None
    return name, float(known.max() if is_higher_better(name) else known.min())


def _as_int(value: Any) -> int | None:
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


MAX_CURVES = 3
_DRAWN = ("train/loss", "learner/loss", "episode/success_rate")
MAX_NAME_CHARS, MAX_METRIC_CHARS, MAX_BAR_CHARS = 44, 38, 26  # that fit into a panel's line
_BARS = ("lived_s", "money", "memory_peak", "sent_bytes", "communication")


def plot_comparison(columns: Sequence[Column], names: Sequence[str], by: Axis = "time") -> Figure:
    """The curves of the headline and of other metrics, and bars of each quantity that some run knows. `names` label the
    runs."""
    bars = [name for name in _BARS if any(column.values.get(name) for column in columns)]
    metrics = _choose_metrics(columns)
    width = max(5.0 * len(metrics), 2.4 * len(bars))
    with make_figure((width, 6.4 if bars else 3.6), layout="constrained") as figure:
        rows = figure.subfigures(2 if bars else 1, 1, squeeze=False)[:, 0]
        for axes, metric in zip(rows[0].subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
            _plot_curves(axes, columns, names, metric, by)
        places = rows[1].subplots(1, int(width / 2.4), squeeze=False)[0] if bars else ()
        for axes, name in zip_longest(places, bars):
            if name is None:
                axes.remove()
            else:
                _plot_bars(axes, columns, name)
    return figure


def _choose_metrics(columns: Sequence[Column]) -> list[str]:
    """The headline, and metrics that most runs have; "" where there is no headline."""
    headline = next((column.headline[0] for column in columns if column.headline), "")
    counts = Counter(name for column in columns for name in column.curves if name != headline)
    judging = [name for name in sort_names(list(counts)) if name.startswith(VALIDATION) or name in _DRAWN]
    judging.sort(key=lambda name: -counts[name])
    return [headline, *judging][:MAX_CURVES]


def _plot_curves(axes: Axes, columns: Sequence[Column], names: Sequence[str], metric: str, by: Axis) -> None:
    for index, (column, name) in enumerate(zip(columns, names, strict=True)):
        if metric in column.curves:
            curve = column.curves[metric]
            order = np.argsort(curve.x, kind="stable")
            axes.plot(curve.x[order], curve.y[order], color=COLOURS[index % len(COLOURS)], linewidth=1.6)
            axes.lines[-1].set(label=truncate_middle(name, MAX_NAME_CHARS), marker="o" if len(curve.x) == 1 else "")
    axes.set_xlabel(AXES[by])
    add_heading(axes, metric, MAX_METRIC_CHARS)
    if axes.lines:
        axes.legend()
    else:
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
    labels = [format_value(value, unit) if math.isfinite(value) else "-" for value in values]
    axes.bar_label(drawn, labels, fontsize=7.5)
    axes.set_title(textwrap.fill(meaning, MAX_BAR_CHARS))
    axes.set_xticks([])
    axes.set_yticks([])
    axes.margins(y=0.12)


def format_value(value: float, unit: str) -> str:
    """A value of ROWS, for people."""
    return format_number(value) if unit in ("rate", "money", "count") else format_quantity(value, unit)
