"""Arrivals of requests from a file: their times, or counts per minute.

Called by `shoal serve simulate --trace`. A CSV or Parquet file with a column `time` has a row for each request; with a
column `count` too, a row for each minute that began at `time`, whose requests are spread over it at random. Times are
seconds (since 1970, or since anything) or dates with times.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import DataError, needs_extra
from shoal.frame import find_names, to_floats

MAX_REQUESTS = 20_000_000  # half a minute of simulation, and a gigabyte
MINUTE_S = 60.0
MAX_TIME_S = 253_402_000_000.0  # what a date can be
REMEDY = "a trace has the column `time`, or `time` and `count` (requests of the minute that begins then)"


def read_trace(path: Path, seed: int = 0) -> np.ndarray:
    """The arrival times in seconds, ascending. Raises DataError naming the file, column and row that do not fit."""
    table = _read_table(path)
    names = find_names(table) or []
    if "time" not in names:
        raise DataError("trace", str(path), f"has no column `time`, but {', '.join(names) or 'none'}", REMEDY)
    if twice := [name for name in ("time", "count") if names.count(name) > 1]:
        raise DataError("trace", str(path), f"has the column `{twice[0]}` more than once", REMEDY)
    columns = ["time", "count"] if "count" in names else ["time"]
    values = to_floats("trace", table.select(columns), columns)
    if not len(values):
        raise DataError("trace", str(path), "has no rows", REMEDY)
    for column, each in zip(columns, values.T, strict=True):
        if (bad := np.flatnonzero(~np.isfinite(each))).size:
            raise DataError("trace", str(path), f"`{column}` of row {bad[0]} is missing or not finite", REMEDY)
    if np.abs(values[:, 0]).max(initial=0.0) > MAX_TIME_S:
        raise DataError("trace", str(path), "has times after the year 9999", "times are in seconds, not milliseconds")
    times = values[:, 0] if len(columns) == 1 else _spread_counts(path, values, seed)
    if len(times) < 2 or times.max() <= times.min():
        raise DataError("trace", str(path), "has fewer than two times", "give a trace of some minutes at least")
    _require_few(path, len(times))
    return np.sort(times)


def _read_table(path: Path) -> Any:
    with needs_extra("data"):
        import pyarrow
        import pyarrow.csv
        import pyarrow.parquet

    try:
        if path.suffix == ".parquet":
            return pyarrow.parquet.read_table(path)
        if path.suffix == ".csv":
            return pyarrow.csv.read_csv(path)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError("trace", str(path), f"cannot be read: {error}", REMEDY) from None
    raise DataError("trace", str(path), "is neither .csv nor .parquet", REMEDY)


def _spread_counts(path: Path, values: np.ndarray, seed: int) -> np.ndarray:
    starts, counts = values.T
    if (bad := np.flatnonzero((counts < 0) | (counts != np.floor(counts)))).size:
        raise DataError("trace", str(path), f"`count` of row {bad[0]} is {counts[bad[0]]:g}, no count of requests")
    if len(np.unique(starts)) < len(starts):
        raise DataError("trace", str(path), "has a minute twice", "add up its counts")
    if (np.diff(np.sort(starts)) < MINUTE_S).any():
        raise DataError("trace", str(path), "has rows less than a minute apart", "a row counts one minute")
    _require_few(path, counts.sum())
    spread: np.ndarray = np.repeat(starts, counts.astype(int))
    return spread + np.random.default_rng(seed).uniform(0.0, MINUTE_S, len(spread))


def _require_few(path: Path, requests: float) -> None:
    if requests > MAX_REQUESTS:
        problem = f"has {requests:,.0f} requests, and a simulation at most {MAX_REQUESTS:,}"
        raise DataError("trace", str(path), problem, "give a part of it, such as the busiest day")
