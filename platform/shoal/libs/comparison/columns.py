"""Runs side by side: their results, duration and cost. Reads only the run record.

Called by `shoal compare`. Works for any run: unrecorded values are omitted from its column.

A curve is a metric over a run's steps, its epochs or its running time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import yaml

from shoal.extend.cost import MEASURED, PREDICTED, CostTable, format_quantity
from shoal.extend.runs import (
    VALIDATION,
    Line,
    MetricHistory,
    Panel,
    Run,
    RunKind,
    format_duration,
    format_number,
    infer_direction,
    is_higher_better,
    read_curves,
    truncate_middle,
)

if TYPE_CHECKING:
    from pandas import DataFrame

Axis = Literal["step", "epoch", "time"]
AXES: dict[Axis, str] = {"step": "step", "epoch": "epoch", "time": "running time (s)"}
EPOCH = "train/epoch"


@dataclass(frozen=True)
class MetricCurve:
    """The values y of a metric, by their steps, and the position x of each; NaN where it is unknown."""

    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class MetricSummary:
    """final: the newest value. best: the best finite one; None where the metric's name does not show what is better.
    common: the newest value up to the position that all runs have reached; NaN before the first. `*_at`: positions"""

    final: float
    final_at: float
    best: float | None
    best_at: float
    common: float


def build_curves(run: Run, by: Axis, attempts: Sequence[tuple[float, float]]) -> dict[str, MetricCurve]:
    """The curves of all metrics of a run. attempts: its running times, in seconds since it was created"""
    logged = read_curves(run)
    epochs = logged.get(EPOCH)

    def find_positions(metric: MetricHistory) -> np.ndarray:
        positions: np.ndarray = metric.steps.astype(float)
        if by == "time":  # without the time between two attempts
            times = metric.times - run.created_at
            positions = np.sum([np.clip(times, begin, end) - begin for begin, end in attempts], axis=0)
        elif by == "epoch":
            unknown = positions * math.nan
            positions = unknown if epochs is None else np.interp(positions, epochs.steps, epochs.values)
        return positions

    return {name: MetricCurve(find_positions(metric), metric.values) for name, metric in logged.items()}


def find_end(curves: Mapping[str, MetricCurve]) -> float:
    """The last position that a run has reached; NaN where none is known."""
    ends = [curve.x.max() for curve in curves.values() if len(curve.x) and np.isfinite(curve.x).any()]
    return float(max(ends, default=math.nan))


def summarize(name: str, curve: MetricCurve, common_at: float) -> MetricSummary:
    """What is compared of a metric. common_at: the position that all runs have reached"""
    is_higher_better, finite = infer_direction(name), np.flatnonzero(np.isfinite(curve.y))
    best, best_at = None, math.nan
    if is_higher_better is not None and len(finite):
        index = finite[(np.argmax if is_higher_better else np.argmin)(curve.y[finite])]
        best, best_at = float(curve.y[index]), float(curve.x[index])
    until = np.flatnonzero(curve.x <= common_at)
    common = curve.y[until[np.argmax(curve.x[until])]] if len(until) else math.nan
    return MetricSummary(float(curve.y[-1]), float(curve.x[-1]), best, best_at, float(common))


def sort_names(names: Sequence[str]) -> list[str]:
    """Names of metrics: those that show what is better first, of held-out data before others."""
    return sorted(names, key=lambda name: (infer_direction(name) is None, not name.startswith(VALIDATION), name))


def format_position(at: float, by: Axis) -> str:
    """A position, for people."""
    if not math.isfinite(at):
        return "-"
    return format_duration(at) if by == "time" else format_number(round(at, 2))


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
MAX_NAME_CHARS = 44  # that fit into a panel's line


def build_panels(columns: Sequence[Column], by: Axis = "time") -> list[Panel]:
    """The curves of the headline, and of others that most runs have."""
    headline = next((column.headline[0] for column in columns if column.headline), "")
    counts = Counter(name for column in columns for name in column.curves if name != headline)
    judging = [name for name in sort_names(list(counts)) if name.startswith(VALIDATION) or name in _DRAWN]
    judging.sort(key=lambda name: -counts[name])
    panels = []
    for metric in [headline, *judging][:MAX_CURVES]:
        lines = []
        for column in columns:
            if (curve := column.curves.get(metric)) is not None:
                order = np.argsort(curve.x, kind="stable")
                name = truncate_middle(f"{column.run.name} {column.run.id}", MAX_NAME_CHARS)
                lines.append(Line(name, curve.x[order].tolist(), curve.y[order].tolist()))
        panels.append(Panel(title=metric or "no run has logged what it could be judged by", x=AXES[by], lines=lines))
    return panels


def format_value(value: float, unit: str) -> str:
    """A value of ROWS, for people."""
    return format_number(value) if unit in ("rate", "money", "count") else format_quantity(value, unit)
