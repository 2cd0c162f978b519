"""Columns of words, dates and gaps as numbers: fitted to some rows, then applied to others. Imports no torch.

A gap, and a word that the fitted rows do not have, are NaN. Called by `few_rows`.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shoal.errors import DataError
from shoal.frame import find_names, list_text_kinds, parse_cell, require_columns, to_floats
from shoal.libs.tables.tables import MAX_COLUMNS


@dataclass(frozen=True)
class Cells:
    """One column as it is given: texts are words, or None; numbers are NaN where there is a text or a gap."""

    name: str
    texts: list[str | None]
    numbers: np.ndarray
    has_dates: bool = False
    levels: tuple[str, ...] = ()  # in order, of an ordered pandas category


@dataclass(frozen=True)
class FittedColumn:
    """How one column becomes numbers.

    kind:       of its texts; `word`: they are levels
    levels:     words that have a column of zeros and ones; if ordered, the words that are counted from 0
    known:      all words of the fitted rows
    """

    name: str
    kind: str = "number"
    levels: tuple[str, ...] = ()
    known: frozenset[str] = frozenset()
    is_ordered: bool = False

    def encode(self, field: str, cells: Cells) -> np.ndarray:
        """Numbers [rows, columns]. Raises DataError for a word where numbers were, and the reverse."""
        if self.kind != "word":
            numbers = cells.numbers.copy()
            for row, text in enumerate(cells.texts):
                if text is None:
                    continue
                if (number := parse_cell(self.kind, text)) is None:
                    problem = f"row {row} has {text!r}, and the column has numbers or dates"
                    raise DataError(f"{field}.{self.name}", text, problem, "give a number, or None")
                numbers[row] = number
            return numbers[:, None]
        if (is_number := ~np.isnan(cells.numbers)).any():
            row = int(is_number.argmax())
            problem = f"row {row} has a number, and the column has words, such as {self.levels[0]!r}"
            remedy = "give words alone, or numbers alone"
            raise DataError(f"{field}.{self.name}", float(cells.numbers[row]), problem, remedy)
        if self.is_ordered:
            places = {word: float(place) for place, word in enumerate(self.levels)}
            return np.array([[places.get(text or "", np.nan)] for text in cells.texts])
        gap, words = [np.nan] * len(self.levels), (text if text in self.known else None for text in cells.texts)
        return np.array([gap if word is None else [float(word == each) for each in self.levels] for word in words])


class TableEncoder:
    """The columns of some rows, as numbers.

    rows: a frame (pandas, Arrow), a list of dicts, or an array or list of rows

    Numbers, truths and dates are one column each, and so are texts that all read as numbers or dates. Other words get
    columns of zeros and ones, the most frequent words first, as far as MAX_COLUMNS admits. An ordered category of
    pandas is one column. Raises DataError by column and row.
    """

    def __init__(self, rows: Any) -> None:
        self.names, columns = read_columns("X", rows)
        found = [_fit(each) for each in columns]
        free = max(0, MAX_COLUMNS - len(found))
        wished = [each.levels[1:] if each.kind == "word" and not each.is_ordered else () for each in found]
        extra = [0] * len(found)
        for place in range(max(map(len, wished), default=0)):  # a further word of each column in turn
            for at, words in enumerate(wished):
                if place < len(words) and len(found[at].known) > 2 and free:
                    extra[at], free = extra[at] + 1, free - 1
        self._columns = [
            each if each.kind != "word" or each.is_ordered else replace(each, levels=each.levels[: 1 + more])
            for each, more in zip(found, extra, strict=True)
        ]

    def encode(self, field: str, rows: Any) -> np.ndarray:
        """Numbers [rows, columns]; columns with names in any order. Raises DataError."""
        names, given = read_columns(field, rows)
        if self.names is not None and names is not None:
            require_columns(field, names, self.names)
            given = [given[names.index(name)] for name in self.names]
        elif (self.names is None) != (names is None) or len(given) != len(self._columns):
            shown = f"{len(given)} columns without names" if names is None else ", ".join(names)
            wanted = f"{len(self._columns)} without names" if self.names is None else ", ".join(self.names)
            raise DataError(field, shown, "are not the columns of X", f"those are {wanted}")
        parts = [column.encode(field, cells) for column, cells in zip(self._columns, given, strict=True)]
        return np.concatenate(parts, 1) if parts else np.zeros((len(rows), 0))


def read_columns(field: str, rows: Any) -> tuple[list[str] | None, list[Cells]]:
    """The names of the columns, None of an array, and the columns. Raises DataError for what is no table."""
    if isinstance(rows, Mapping):
        rows = [rows]
    names = find_names(rows)
    if isinstance(rows, Sequence) and len(rows) and isinstance(rows[0], Mapping):
        names = list(dict.fromkeys(str(name) for row in rows for name in row))
        for at, row in enumerate(rows):
            if missing := [name for name in names if name not in row]:
                problem = f"row {at} lacks it"
                raise DataError(f"{field}.{missing[0]}", None, problem, "give None where a value is unknown")
        return names, [_read_cells(field, name, [row[name] for row in rows]) for name in names]
    if hasattr(rows, "iloc"):
        if rows.ndim == 2:
            labels = names or [str(at) for at in range(rows.shape[1])]
            return names, [_read_cells(field, name, rows.iloc[:, at]) for at, name in enumerate(labels)]
    elif names is not None:
        return names, [_read_cells(field, name, rows.column(at).to_pylist()) for at, name in enumerate(names)]
    array = rows if isinstance(rows, np.ndarray) else np.array(rows, object)
    if array.ndim != 2:
        problem = f"has {array.ndim} dimensions" if array.size else "has no rows"
        raise DataError(field, type(rows).__name__, problem, "give rows x columns, a frame, or a list of dicts")
    return None, [_read_cells(field, str(at), array[:, at]) for at in range(array.shape[1])]


def _read_cells(field: str, name: str, values: Any) -> Cells:
    levels: tuple[str, ...] = ()
    kind = getattr(values, "dtype", None)
    if getattr(kind, "kind", "O") in "biufmM":
        return Cells(name, [None] * len(values), to_floats(field, values), getattr(kind, "kind", "") == "M")
    if getattr(kind, "ordered", False):
        levels = tuple(str(each) for each in kind.categories)  # type: ignore[union-attr]
        values = [each if isinstance(each, float) and each != each else str(each) for each in values]
    cells = values.tolist() if hasattr(values, "tolist") else list(values)
    texts = [each.strip() or None if isinstance(each, str) else None for each in cells]
    others = np.empty(len(cells), object)
    others[:] = [None if isinstance(each, str) else each for each in cells]
    has_dates = any(isinstance(each, datetime.date) for each in cells)
    return Cells(name, texts, to_floats(f"{field}.{name}", others), has_dates, levels)


def _fit(cells: Cells) -> FittedColumn:
    words = Counter(each for each in cells.texts if each is not None)
    if cells.levels:
        return FittedColumn(cells.name, "word", cells.levels, is_ordered=True)
    kinds = ["date"] if cells.has_dates else list_text_kinds(words) or ["number"]
    if kinds[0] == "number" or (len(kinds) == 1 and kinds[0] not in ("word", "truth")):  # else of several meanings
        return FittedColumn(cells.name, kinds[0])
    levels = tuple(sorted(words, key=lambda each: (-words[each], each)))
    column = FittedColumn(cells.name, "word", levels, frozenset(words))
    column.encode("X", cells)  # words alone
    return column
