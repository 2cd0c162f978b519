"""The newest value and the finite extremes of each metric, which the record stores in addition to its history.

Called by the recorder, which alone writes the rows of its run: `compute_summaries_up_to` before its transactions, the
rest within them.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence

from shoal.runs.record.metric_mirror import LogEntry

_UPSERT = """
INSERT INTO summaries (run, name, step, time, value, lowest, highest) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (run, name) DO UPDATE SET step = excluded.step, time = excluded.time, value = excluded.value,
    lowest = min(ifnull(lowest, excluded.lowest), ifnull(excluded.lowest, lowest)),
    highest = max(ifnull(highest, excluded.highest), ifnull(excluded.highest, highest))
"""
# With a lone max(), SQLite takes the other columns from the row of the maximum. It reads 9e999 as infinity.
_UP_TO = """
SELECT :run, name, step, time, value, lowest, highest
FROM (SELECT name, step, max(time) AS time, value FROM metrics WHERE run = :run AND step <= :step GROUP BY name)
JOIN (SELECT name, min(finite) AS lowest, max(finite) AS highest
    FROM (SELECT name, CASE WHEN abs(value) < 9e999 THEN value END AS finite FROM metrics
        WHERE run = :run AND step <= :step)
    GROUP BY name) USING (name)
"""
_ANY_LATER = "SELECT 1 FROM metrics WHERE run = ? AND step > ? LIMIT 1"
_INSERT = "INSERT INTO summaries (run, name, step, time, value, lowest, highest) VALUES (?, ?, ?, ?, ?, ?, ?)"

Row = tuple[int, str, int, float, float | None, float | None, float | None]


def update_summaries(connection: sqlite3.Connection, run: int, logged: Sequence[LogEntry]) -> None:
    """Add the logged entries."""
    newest: dict[str, tuple[int, float, float]] = {}
    finite: dict[str, list[float]] = {}
    for step, at, values in sorted(logged, key=lambda entry: entry[1]):
        for name, value in values.items():
            newest[name] = (step, at, value)
            if math.isfinite(value):
                finite.setdefault(name, []).append(value)
    extremes = {name: (min(values), max(values)) for name, values in finite.items()}
    rows = [(run, name, *last, *extremes.get(name, (None, None))) for name, last in newest.items()]
    connection.executemany(_UPSERT, rows)


def delete_group(connection: sqlite3.Connection, run: int, group: str) -> None:
    """Remove the metrics named `group/...`."""
    after = chr(ord("/") + 1)
    connection.execute(
        "DELETE FROM summaries WHERE run = ? AND name >= ? AND name < ?", (run, f"{group}/", f"{group}{after}")
    )


def compute_summaries_up_to(connection: sqlite3.Connection, run: int, step: int) -> list[Row] | None:
    """The summaries of the history up to `step`; None if there is no later step, and so nothing to remove.

    Reads the whole history: call it before the transaction, which would make other writers wait.
    """
    if connection.execute(_ANY_LATER, (run, step)).fetchone() is None:
        return None
    return [tuple(row) for row in connection.execute(_UP_TO, {"run": run, "step": step})]


def delete_after(connection: sqlite3.Connection, run: int, step: int, remaining: Sequence[Row]) -> None:
    """Remove the later steps from the history; its summaries become `remaining`."""
    connection.execute("DELETE FROM metrics WHERE run = ? AND step > ?", (run, step))
    connection.execute("DELETE FROM summaries WHERE run = ?", (run,))
    connection.executemany(_INSERT, remaining)
