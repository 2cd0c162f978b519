"""The metrics of a run over its steps, its epochs or its running time, and what is compared of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shoal.extend.runs import (
    VALIDATION,
    MetricHistory,
    Run,
    format_duration,
    format_number,
    infer_direction,
    read_curves,
)

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
