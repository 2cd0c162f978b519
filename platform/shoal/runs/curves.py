"""The values of a run's metrics as they are drawn: a sample at once, all of them, and those that are new.

Called by what draws a run live. A run of a million values is read in a second; its sample in some hundredths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal.home import home
from shoal.runs.record.database import read_connection
from shoal.runs.run_reader import Run

_COLUMNS = "SELECT step, name, time, value FROM metrics WHERE run = :run"
_ROWS_AT_ONCE = 2000  # that fit into the processor's cache

Columns = dict[str, list[float | None] | list[int]]


@dataclass
class MetricHistory:
    """Of one metric. steps, times, values [N], ordered by step; times in Unix seconds."""

    steps: np.ndarray
    times: np.ndarray
    values: np.ndarray


def thin(curve: MetricHistory, num_points: int, first: float = -math.inf, last: float = math.inf) -> Columns:
    """Columns of at most about `num_points` points between two steps, and one beyond each: the line leaves there.

    Of each part the lowest and the highest value are among them, so that no peak is lost.
    """
    begin, end = (int(curve.steps.searchsorted(*each)) for each in ((first, "left"), (last, "right")))
    begin, end = max(0, begin - 1), min(len(curve.steps), end + 1)
    chosen = np.arange(begin, end)
    if len(chosen) > num_points:
        chosen = begin + choose_extremes(curve.values[begin:end], num_points)
    return {name: getattr(curve, name)[chosen].tolist() for name in ("steps", "times", "values")}


def choose_extremes(values: np.ndarray, num_points: int) -> np.ndarray:
    """The places of the lowest and the highest value of each of `num_points // 2` parts, and of both ends."""
    num_parts = max(1, num_points // 2)
    width = -(-len(values) // num_parts)
    padded = np.pad(values, (0, -len(values) % width), mode="edge").reshape(-1, width)
    starts = np.arange(len(padded)) * width
    lowest = np.where(np.isnan(padded), np.inf, padded).argmin(1) + starts
    highest = np.where(np.isnan(padded), -np.inf, padded).argmax(1) + starts
    places = np.unique(np.concatenate([[0], lowest, highest, [len(values) - 1]]))
    return places[places < len(values)]


class NewestValue(NamedTuple):
    """The newest value of a metric, and its finite extremes (None: there is no finite value).

    time: when it was logged; Unix time in seconds
    """

    name: str
    step: int
    time: float
    value: float
    lowest: float | None
    highest: float | None


def summarize_metrics(run: Run) -> list[NewestValue]:
    """Of each metric, by name; costs the number of metrics, not the length of the run."""
    rows = run.query("SELECT name, step, time, value, lowest, highest FROM summaries WHERE run = :run ORDER BY name")
    return [NewestValue(row[0], row[1], row[2], _read_value(row[3]), row[4], row[5]) for row in rows]


def read_newest(runs: Sequence[Run], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """The newest values of some metrics, by the run's id and the metric's name; one query for all runs."""
    if not runs or not names:
        return {}
    ids = {run._number: run.id for run in runs}
    found: dict[str, dict[str, float]] = {}
    with read_connection(home()) as connection:
        marks = ",".join("?" * len(names))
        for row in connection.execute(f"SELECT run, name, value FROM summaries WHERE name IN ({marks})", names):
            if row["run"] in ids:
                found.setdefault(ids[row["run"]], {})[row["name"]] = _read_value(row["value"])
    return found


def list_metric_names() -> list[str]:
    """Of all runs; those of the most runs first."""
    with read_connection(home()) as connection:
        sql = "SELECT name FROM summaries GROUP BY name ORDER BY count(*) DESC, name"
        return [row["name"] for row in connection.execute(sql)]


def sample_curves(run: Run, num_steps: int) -> dict[str, MetricHistory]:
    """All values of about `num_steps` steps, evenly between the first and the last, by metric.

    A metric that was logged at other steps is missing or sparse here.
    """
    first, last = run.query(
        "SELECT (SELECT min(step) FROM metrics WHERE run = :run), (SELECT max(step) FROM metrics WHERE run = :run)"
    )[0]
    if first is None:
        return {}
    return _read_curves(
        run,
        "WITH RECURSIVE wanted(place) AS (SELECT 0 UNION ALL SELECT place + 1 FROM wanted WHERE place < :last_place),"
        " steps(step) AS (SELECT DISTINCT (SELECT step FROM metrics WHERE run = :run"
        " AND step >= :first + place * (:last - :first) / :last_place ORDER BY step LIMIT 1) FROM wanted)"
        " SELECT step, name, time, value FROM steps JOIN metrics USING (step) WHERE run = :run ORDER BY step",
        first=first,
        last=last,
        last_place=num_steps - 1,
    )


def read_curves(run: Run, *, after_step: int = -1, after_time: float = -math.inf) -> dict[str, MetricHistory]:
    """All values of the steps after one, or logged after a time (Unix seconds), by metric.

    Those of the last steps cost their number; those after a time the length of the run.
    """
    if math.isfinite(after_time):
        return _read_curves(run, f"{_COLUMNS} AND time > :after ORDER BY step", after=after_time)
    return _read_curves(run, f"{_COLUMNS} AND step > :after ORDER BY step", after=after_step)


def _read_curves(run: Run, sql: str, **parameters: float) -> dict[str, MetricHistory]:
    numbers: dict[str, int] = {}
    parts = []
    for rows in run.query_parts(sql, _ROWS_AT_ONCE, **parameters):
        steps, names, times, values = zip(*rows, strict=True)
        for name in dict.fromkeys(names):
            numbers.setdefault(name, len(numbers))
        of_names = np.array(list(map(numbers.__getitem__, names)))
        parts.append((np.array(steps), of_names, np.array(times), np.array(values, float)))  # None is NaN
    if not parts:
        return {}
    all_steps, all_names, all_times, all_values = map(np.concatenate, zip(*parts, strict=True))
    chosen = {name: np.flatnonzero(all_names == number) for name, number in numbers.items()}
    return {name: MetricHistory(all_steps[own], all_times[own], all_values[own]) for name, own in chosen.items()}


def _read_value(value: float | None) -> float:
    return math.nan if value is None else value
