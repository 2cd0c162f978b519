"""Which of several measured models is chosen: the cheapest whose quality has dropped by no more than is allowed.

How far it has dropped is a verdict, by the rows that have measured it. Each row has measured both models, so their
difference is judged: by the score interval of paired proportions (Tango, Statistics in Medicine 17:891-908, 1998) where
a row is right or wrong, and by the interval of a mean of differences otherwise.

Pure functions of numbers. Called by `search`, and by the plot for its front.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

from shoal.errors import ConfigError

Cost = Literal["latency", "batch", "size", "flops"]
Status = Literal["within", "beyond", "undecided"]
MOST_ROWS, ROUNDING = 1e9, 1e-9
MIN_GAIN = 0.05  # that a smaller model must save: less may be the noise of a timing


@dataclass(frozen=True)
class MaxDrop:
    """The largest drop of a metric: `1%` of the teacher's value, or `0.01` in the metric's own unit."""

    value: float
    is_relative: bool

    @classmethod
    def parse(cls, text: str) -> MaxDrop:
        """Raises ConfigError."""
        matched = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,2})?)\s*(%?)", text.strip(), re.IGNORECASE)
        if matched is None:
            remedy = "write 1% of the model's own value, or 0.01 in the metric's unit"
            raise ConfigError("--max-drop", text, "is no drop", remedy)
        number, is_relative = float(matched[1]), bool(matched[2])
        if is_relative and number >= 100:
            raise ConfigError("--max-drop", text, "allows any model at all", "write less than 100%")
        return cls(number / 100 if is_relative else number, is_relative)

    def compute_limit(self, teacher: float, is_higher_better: bool) -> float:
        """The worst value that is allowed."""
        allowed = self.value * abs(teacher) if self.is_relative else self.value
        return teacher - allowed if is_higher_better else teacher + allowed


@dataclass(frozen=True)
class Measurement:
    """What one model gives and costs, after its last step.

    metrics:         of the evaluation, by name
    latency_s:       of one sample; batch_latency_s: of a batch; medians
    size_bytes:      of the registered file
    flops:           of one sample in float32; None: not countable
    """

    metrics: dict[str, float]
    latency_s: float
    batch_latency_s: float
    size_bytes: int
    flops: float | None

    def get_cost(self, kind: Cost) -> float:
        """The number that is to be small; infinite when unknown."""
        costs = {"latency": self.latency_s, "batch": self.batch_latency_s, "size": float(self.size_bytes)}
        return {**costs, "flops": math.inf if self.flops is None else self.flops}[kind]


def choose(measured: Sequence[Measurement], is_within: Sequence[bool], cost: Cost) -> int:
    """The index of the cheapest within the limit, of equal ones the fastest; 0, the teacher, if none saves MIN_GAIN."""
    most = measured[0].get_cost(cost) * (1 - MIN_GAIN)
    fitting = [
        index for index, each in enumerate(measured) if index and is_within[index] and each.get_cost(cost) <= most
    ]
    return min(fitting, key=lambda index: (measured[index].get_cost(cost), measured[index].latency_s), default=0)


def find_pareto_front(measured: Sequence[Measurement], metric: str, is_higher_better: bool, cost: Cost) -> list[int]:
    """The indices of those that no other beats in both quality and cost, cheapest first."""
    sign = 1.0 if is_higher_better else -1.0
    order = sorted(
        (index for index, each in enumerate(measured) if math.isfinite(each.metrics[metric])),
        key=lambda index: (measured[index].get_cost(cost), -sign * measured[index].metrics[metric]),
    )
    front: list[int] = []
    for index in order:
        if not front or sign * measured[index].metrics[metric] > sign * measured[front[-1]].metrics[metric]:
            front.append(index)
    return front


class RowTotals(NamedTuple):
    """A metric over rows: it is the sum of the totals over that of the counts."""

    totals: np.ndarray  # [N]
    counts: np.ndarray  # [N]


@dataclass(frozen=True)
class Verdict:
    """How far the metric has dropped: positive is worse.

    low, high: its interval; both `drop` where the metric is no mean over rows
    num_rows:  that say so; 0 where the metric is no mean over rows
    more_rows: so many further ones would decide, if they are like these; None: it is decided, or no number would
    """

    drop: float
    low: float
    high: float
    status: Status
    num_rows: int = 0
    more_rows: int | None = None


def judge_value(drop: float, allowed: float, num_rows: int = 0) -> Verdict:
    """By the measured drop alone; NaN is not within."""
    return Verdict(drop, drop, drop, "within" if drop <= allowed + ROUNDING else "beyond", num_rows)


def judge(teacher: RowTotals, student: RowTotals, is_higher_better: bool, allowed: float, confidence: float) -> Verdict:
    """Whether the drop is at most `allowed`, with this confidence on either side; 0.5 is the measured drop alone."""
    sign = 1.0 if is_higher_better else -1.0
    num_rows = len(teacher.totals)
    z = NormalDist().inv_cdf(confidence)
    drop = sign * float(teacher.totals.sum() / teacher.counts.sum() - student.totals.sum() / student.counts.sum())
    if not math.isfinite(drop) or num_rows < 2 or z == 0:
        return judge_value(drop, allowed, num_rows)
    is_binary = all((each.counts == 1).all() and np.isin(each.totals, (0, 1)).all() for each in (teacher, student))
    if is_binary:
        difference = sign * (teacher.totals - student.totals)
        worse, better = float((difference > 0).sum()), float((difference < 0).sum())
    else:
        influence = _find_influence(teacher) - _find_influence(student)
        deviation = float(influence.std(ddof=1))

    def find_interval(size: float) -> tuple[float, float]:
        """Of `size` rows that are like these."""
        if is_binary:
            share = size / num_rows
            low, high = (_solve_score(worse * share, better * share, size, side) for side in (z, -z))
            return low, high
        freedom = size - 1
        quantile = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)  # of Student's t
        half = quantile * deviation / math.sqrt(size)
        return drop - half, drop + half

    def is_decided(size: float) -> bool:
        low, high = find_interval(size)
        return high <= allowed or low > allowed

    low, high = find_interval(num_rows)
    if is_decided(num_rows):
        return Verdict(drop, low, high, "within" if high <= allowed else "beyond", num_rows)
    few, many = float(num_rows), 2.0 * num_rows
    while not is_decided(many) and many < MOST_ROWS:
        few, many = many, 2 * many
    if many >= MOST_ROWS:
        return Verdict(drop, low, high, "undecided", num_rows)
    while many - few > 1:
        middle = (few + many) / 2
        few, many = (few, middle) if is_decided(middle) else (middle, many)
    return Verdict(drop, low, high, "undecided", num_rows, math.ceil(many) - num_rows)


def _find_influence(rows: RowTotals) -> np.ndarray:
    """What each row adds to the metric, beside the mean: [N]."""
    mean = rows.totals.sum() / rows.counts.sum()
    found: np.ndarray = (rows.totals - mean * rows.counts) / rows.counts.mean()
    return found


def _solve_score(worse: float, better: float, size: float, z: float) -> float:
    """The drop at which Tango's statistic is `z`.

    worse, better: rows that the student alone has wrong, or right
    """
    low, high = -1.0 + 1e-12, 1.0 - 1e-12  # the statistic falls
    for _ in range(60):
        drop = (low + high) / 2
        linear = -worse - better + (2 * size - worse + better) * drop
        root = math.sqrt(max(0.0, linear**2 + 8 * size * better * drop * (1 - drop)))
        probability = (root - linear) / (4 * size)  # of a row that the student alone has right
        variance = size * (2 * probability + drop * (1 - drop))
        statistic = (worse - better - size * drop) / math.sqrt(max(variance, 1e-300))
        low, high = (drop, high) if statistic > z else (low, drop)
    return (low + high) / 2
