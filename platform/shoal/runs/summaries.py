"""The newest value and the finite extremes of each metric, which the record keeps beside its history.

Called by the recorder, within its transactions.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence

from shoal.runs.mirror import Logged

_UPSERT = """
INSERT INTO summaries (run, name, step, time, value, lowest, highest) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (run, name) DO UPDATE SET step = excluded.step, time = excluded.time, value = excluded.value,
    lowest = min(ifnull(lowest, excluded.lowest), ifnull(excluded.lowest, lowest)),
    highest = max(ifnull(highest, excluded.highest), ifnull(excluded.highest, highest))
"""
# SQLite takes the columns beside a lone max() from the row that has the maximum, and reads 9e999 as infinity.
_MAKE_ANEW = """
INSERT INTO summaries (run, name, step, time, value, lowest, highest)
SELECT ?1, name, step, time, value, lowest, highest
FROM (SELECT name, step, max(time) AS time, value FROM metrics WHERE run = ?1 GROUP BY name)
JOIN (SELECT name, min(finite) AS lowest, max(finite) AS highest
    FROM (SELECT name, CASE WHEN abs(value) < 9e999 THEN value END AS finite FROM metrics WHERE run = ?1)
    GROUP BY name) USING (name)
"""


def summarise(connection: sqlite3.Connection, run: int, logged: Sequence[Logged]) -> None:
    """Add what was logged."""
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


def forget_after(connection: sqlite3.Connection, run: int, step: int) -> None:
    """Take the later steps out of the history, and make the summaries anew of what is left of it."""
    if connection.execute("DELETE FROM metrics WHERE run = ? AND step > ?", (run, step)).rowcount:
        connection.execute("DELETE FROM summaries WHERE run = ?", (run,))
        connection.execute(_MAKE_ANEW, (run,))
