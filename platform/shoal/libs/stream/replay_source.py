"""Rows of files as a stream: Parquet, CSV or lines of JSON. The same messages as from a broker, as fast as they come.

Called by the flow, tests and benchmarks. A message's publisher is its file, its sequence the row, from 1.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import DataError, needs_extra
from shoal.frame import to_floats
from shoal.libs.stream.messages import Message, are_usable
from shoal.sources import Delivery, MalformedPayload, StreamState

SENSOR = "sensor"
VALUE = "value"
TIME = "time"
PUBLISHER = "publisher"
SEQUENCE = "sequence"
SUFFIXES = (".parquet", ".csv", ".jsonl")


class _Row(NamedTuple):
    publisher: str
    sequence: int
    content: Message | MalformedPayload


class ReplaySource:
    """The rows of `files` (paths or patterns), one file after the other.

    Columns: `value` (a number, or a list of `width`), and where they are there `sensor` (else the file's name), `time`
    (a number, or a date, of UTC where it has no zone; else the row), `publisher` and `sequence`. Raises DataError for
    files that are missing, of another kind or without a column `value`.
    """

    def __init__(self, files: Sequence[str], width: int = 1) -> None:
        self._paths = [Path(path) for pattern in files for path in sorted(glob.glob(pattern)) or [pattern]]
        for path in self._paths:
            if path.suffix not in SUFFIXES:
                raise DataError("files", str(path), "is of another kind", f"there is {', '.join(SUFFIXES)}")
            if not path.is_file():
                raise DataError("files", str(path), "there is no such file")
        self._width = width
        self._rows: Iterator[Message | MalformedPayload] = iter(())
        self.num_delivered, self.is_exhausted = 0, False

    def example(self) -> Message:
        """The first message of the files."""
        for row in self._read_all():
            if isinstance(row.content, Message):
                return row.content
        raise DataError("files", str(self._paths[0]), "has no row with a value")

    def open(self, state: StreamState) -> None:
        """Begin after the rows that `state` has learnt."""
        learnt = state.sequences
        self._rows = (row.content for row in self._read_all() if row.sequence > learnt.get(row.publisher, -1))
        self.is_exhausted = False

    def poll(self, max_messages: int, timeout_s: float) -> Delivery:
        rows = list(islice(self._rows, max_messages))
        self.is_exhausted = len(rows) < max_messages
        self.num_delivered += len(rows)
        messages = [row for row in rows if isinstance(row, Message)]
        return Delivery(messages, [row for row in rows if isinstance(row, MalformedPayload)])

    def commit(self, state: StreamState) -> None:
        """Files forget nothing."""

    def close(self) -> None:
        self._rows = iter(())

    def _read_all(self) -> Iterator[_Row]:
        return chain.from_iterable(map(self._read, self._paths))

    def _read(self, path: Path) -> Iterator[_Row]:
        table = _load_table(path)
        from pyarrow import types

        if VALUE not in table.column_names:
            problem = f"{path.name} has the columns {', '.join(table.column_names)}"
            raise DataError("files", str(path), problem, f"name the one to learn {VALUE!r}")
        columns = {name: table[name].to_pylist() for name in table.column_names}
        count = table.num_rows
        sensors = columns.get(SENSOR, [path.stem] * count)
        times: Sequence[Any] = columns.get(TIME, range(count))
        if TIME in columns and types.is_temporal(table[TIME].type):  # dates as seconds
            times = to_floats("files", table.select([TIME]))[:, 0].tolist()
        publishers = columns.get(PUBLISHER, [path.name] * count)
        sequences = columns.get(SEQUENCE, range(1, count + 1))
        rows = zip(sensors, columns[VALUE], times, publishers, sequences, strict=True)
        for number, (sensor, value, time, publisher, sequence) in enumerate(rows, 1):
            values = tuple(map(_to_float, value if isinstance(value, list) else [value]))
            time_s = _to_float(time)
            if len(values) == self._width and are_usable(*values, time_s):
                message = Message(str(sensor), values, time_s, str(publisher), int(sequence))
                yield _Row(message.publisher, message.sequence, message)
            else:
                wanted = "a number" if self._width == 1 else f"{self._width} numbers"
                text = f"value {value!r}, time {time!r}"
                problem = f"value or time is not {wanted}"
                malformed = MalformedPayload(f"{path.name}, row {number}", problem, text)
                yield _Row(str(publisher), int(sequence), malformed)


def _load_table(path: Path) -> Any:
    with needs_extra("data"):
        import pyarrow
        from pyarrow import csv, json, parquet

    readers = {".parquet": parquet.read_table, ".csv": csv.read_csv, ".jsonl": json.read_json}
    try:
        return readers[path.suffix](path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError("files", str(path), f"cannot be read: {error}") from None


def _to_float(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan
