"""Whether a model's metric has dropped by no more than is allowed, as far as the rows that have measured it can say.

Each row has measured both models, so their difference is judged: by the score interval of paired proportions (Tango,
Statistics in Medicine 17:891-908, 1998) where a row is right or wrong, and by the interval of a mean of differences
otherwise. Pure functions of numbers. Called by `search`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

Status = Literal["within", "beyond", "undecided"]
MOST_ROWS, ROUNDING = 1e9, 1e-9


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
