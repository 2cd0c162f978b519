"""The values of a run's metrics as they are drawn: a sample at once, all of them, and those that are new.

Called by what draws a run live. A run of a million values is read in a second; its sample in some hundredths.
"""

from __future__ import annotations

import math
import sqlite3
from typing import NamedTuple

from shoal.runs.run_reader import MetricValue, Run

_COLUMNS = "SELECT step, name, time, value FROM metrics WHERE run = :run"


class MetricSummary(NamedTuple):
    """The newest value of a metric, and its finite extremes (None: there is no finite value).

    time: when it was logged; Unix time in seconds
    """

    name: str
    step: int
    time: float
    value: float
    lowest: float | None
    highest: float | None


def summarize_metrics(run: Run) -> list[MetricSummary]:
    """Of each metric, by name; costs the number of metrics, not the length of the run."""
    rows = run.query("SELECT name, step, time, value, lowest, highest FROM summaries WHERE run = :run ORDER BY name")
    return [MetricSummary(row[0], row[1], row[2], _read_value(row[3]), row[4], row[5]) for row in rows]


def sample_values(run: Run, num_steps: int) -> list[MetricValue]:
    """All values of about `num_steps` steps, evenly between the first and the last; ordered by step.

    A metric that was logged at other steps is missing or sparse here.
    """
    first, last = run.query(
        "SELECT (SELECT min(step) FROM metrics WHERE run = :run), (SELECT max(step) FROM metrics WHERE run = :run)"
    )[0]
    if first is None:
        return []
    rows = run.query(
        "WITH RECURSIVE wanted(place) AS (SELECT 0 UNION ALL SELECT place + 1 FROM wanted WHERE place < :last_place),"
        " steps(step) AS (SELECT DISTINCT (SELECT step FROM metrics WHERE run = :run"
        " AND step >= :first + place * (:last - :first) / :last_place ORDER BY step LIMIT 1) FROM wanted)"
        " SELECT step, name, time, value FROM steps JOIN metrics USING (step) WHERE run = :run ORDER BY step",
        first=first,
        last=last,
        last_place=num_steps - 1,
    )
    return _to_values(rows)


def read_values(run: Run, after_step: int = -1) -> list[MetricValue]:
    """All values of the steps after one, ordered by step."""
    return _to_values(run.query(f"{_COLUMNS} AND step > :after ORDER BY step", after=after_step))


def _to_values(rows: list[sqlite3.Row]) -> list[MetricValue]:
    return [MetricValue(row[0], row[1], row[2], _read_value(row[3])) for row in rows]


def _read_value(value: float | None) -> float:
    return math.nan if value is None else value
