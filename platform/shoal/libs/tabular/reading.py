"""Reads a table, and the values of its columns, each of a kind: number, word, date or truth.

Called by `table`. Kinds are inferred from Arrow's types, and from words that are all dates, or all numbers with commas.
A kind may say how a text is read: `date:%d.%m.%Y`, `number:,` with the decimal sign. Fits nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import compress
from pathlib import Path
from shlex import quote
from typing import Any, Literal, get_args

import numpy as np

from shoal.errors import ConfigError, DataError, needs_extra
from shoal.frame import DATE_FORMATS, NUMBER_FORMS
from shoal.open_inference.tables import find_separator
from shoal.store import fetch, locate

with needs_extra("data"):
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import csv, parquet

Kind = Literal["number", "word", "date", "truth"]
Values = np.ndarray  # [N]: float64 with NaN for gaps (dates in seconds since 1970), or str with None for gaps

_ID_NAMES = ("id", "index", "rownames", "rowid", "uuid", "key", "")


def read_table(data: Any, field: str = "data") -> pa.Table:
    """A table from a file (CSV, TSV, Parquet), a URL of the store, a DataFrame, an Arrow table, or columns by name.

    Raises DataError, and ConfigError for what is no table.
    """
    if isinstance(data, str | Path):
        found = _read_file(data, field)
    elif isinstance(data, pa.Table):
        found = data
    elif isinstance(data, pa.RecordBatch):
        found = pa.Table.from_batches([data])
    elif hasattr(data, "iloc") or isinstance(data, Mapping):
        try:
            found = pa.Table.from_pandas(data, preserve_index=False) if hasattr(data, "iloc") else pa.table(dict(data))
        except (pa.ArrowException, TypeError, ValueError) as error:
            remedy = "give each column values of one type"
            raise DataError(field, type(data).__name__, f"is no table: {error}", remedy) from error
    else:
        raise ConfigError(field, type(data).__name__, "is no table", "give a file, a DataFrame, or an Arrow table")
    if not len(found):
        raise DataError(field, str(data) if isinstance(data, str | Path) else type(data).__name__, "has no rows")
    for at, each in enumerate(found.schema):
        if pa.types.is_dictionary(each.type):
            found = found.set_column(at, each.name, found.column(at).cast(each.type.value_type))
    if twice := {name for name in found.column_names if found.column_names.count(name) > 1}:
        raise DataError(field, min(twice), "names two columns", "give each column a name of its own")
    return found


def _read_file(data: str | Path, field: str) -> pa.Table:
    path, shown = locate(data, field), str(data)
    if not path.is_file():
        remedy = f"paths are looked up from {Path.cwd()}"
        raise DataError(field, shown, "is a folder" if path.is_dir() else "does not exist", remedy)
    fetch([path])
    with path.open("rb") as file:
        head = file.read(4)
    try:
        return parquet.read_table(str(path)) if head == b"PAR1" else _read_csv(str(path))
    except (pa.ArrowException, UnicodeDecodeError) as error:
        remedy = "give a CSV file in UTF-8 with a line of names, or a Parquet file"
        raise DataError(field, shown, f"cannot be read as a table: {error}", remedy) from error


def _read_csv(path: str) -> pa.Table:
    with pa.input_stream(path) as file:  # a compressed one is decompressed
        content = file.read()
    content.decode()  # Arrow takes other encodings for bytes without a meaning
    header = content[: content.find(b"\n") + 1 or len(content)]
    return csv.read_csv(
        pa.py_buffer(content),
        csv.ReadOptions(block_size=min(max(len(content), 1 << 20), 1 << 30)),  # types are those of the first block
        csv.ParseOptions(delimiter=find_separator(header), newlines_in_values=True),
        csv.ConvertOptions(strings_can_be_null=True),
    )


def choose_kind(name: str, column: pa.ChunkedArray, explicit: str = "") -> tuple[str, str]:
    """The kind of a column, "" for a type without one, and a note where it is not clear. An `explicit` one without a
    format gets that of the texts."""
    found = _list_kinds(column)
    if explicit:
        return found[0] if len(found) == 1 and found[0].startswith(f"{explicit}:") else explicit, ""
    if len(found) > 1:
        example = quote(f"columns.{name}={found[0]}")
        return "word", f"{name!r} is taken as words: it may be {' or '.join(found)}; say which, as in {example}"
    return (found[0], "") if found else ("", f"left out {name!r}: {column.type} is no number, word, date or truth")


def _list_kinds(column: pa.ChunkedArray) -> list[str]:
    """The kinds of a column: several where all of its texts can be read in several ways."""
    kind, types = column.type, pa.types
    if types.is_boolean(kind):
        return ["truth"]
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_duration(kind):
        return ["number"]
    if types.is_date(kind) or types.is_timestamp(kind):
        return ["date"]
    if not _is_text(column):
        return []
    texts, found = column.cast(pa.string()).drop_null(), list[str]()
    has_marks = pc.match_substring_regex(texts.slice(0, 1000), r"\d.*[-/. ,].*\d")
    if pc.any(has_marks).as_py() and pc.any(pc.match_substring(texts, ",")).as_py():
        found = [
            f"number:{at}" for at, form in NUMBER_FORMS.items() if pc.all(pc.match_substring_regex(texts, form)).as_py()
        ]
    if not found and pc.all(has_marks).as_py():
        fits = [not pc.strptime(texts, each, "us", error_is_null=True).null_count for each in DATE_FORMATS]
        found = [f"date:{each}" for each in compress(DATE_FORMATS, fits)]
        if not found:
            with suppress(pa.ArrowInvalid):
                texts.cast(pa.timestamp("us"))
                found = ["date"]
    return found or ["word"]


def _is_text(column: pa.ChunkedArray) -> bool:
    kind, types = column.type, pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def extract_values(name: str, column: pa.ChunkedArray, kind: str) -> Values:
    """The values of a column as of a kind. Raises DataError naming the column and a value that is not of it."""
    word, _, form = kind.partition(":")
    if word not in get_args(Kind) or (form and word != "date" and not (word == "number" and form in NUMBER_FORMS)):
        remedy = f"one of {', '.join(get_args(Kind))}, or date:%d.%m.%Y, number:, and number:. for decimal signs"
        raise ConfigError(f"columns.{name}", kind, "is no kind of column", remedy)
    is_text = _is_text(column)
    try:
        if word == "word":
            if pa.types.is_floating(column.type) and pc.all(pc.equal(column, pc.round(column))).as_py():
                column = column.cast(pa.int64())  # whole numbers without a fraction
            words: np.ndarray = column.cast(pa.string()).to_numpy(zero_copy_only=False).astype(object)
            words[words == ""] = None
            return words
        if word == "date":
            if is_text and form:
                column = pc.strptime(column.cast(pa.string()), form, "us")
            return _to_floats(column.cast(pa.timestamp("us")).cast(pa.int64())) / 1e6
        if pa.types.is_duration(column.type):
            return _to_floats(column.cast(pa.duration("us")).cast(pa.int64())) / 1e6
        if is_text and form:
            column = pc.replace_substring(pc.replace_substring(column, "." if form == "," else ",", ""), form, ".")
        values = _to_floats(column.cast(pa.bool_()) if word == "truth" else column)
        values[~np.isfinite(values)] = np.nan
        return values
    except pa.ArrowException as error:
        remedy = f"say another kind, as in {quote(f'columns.{name}=word')}, or leave_out=[{name}]"
        raise DataError("column", name, f"has a value that is no {kind}: {error}", remedy) from error


def _to_floats(column: pa.ChunkedArray) -> np.ndarray:
    values: np.ndarray = column.cast(pa.float64(), safe=False).to_numpy()
    return values.astype(np.float64)  # a copy, which may be written to


def find_unusable(name: str, values: Values, kind: str) -> str:
    """Why a column teaches nothing, as the end of a sentence; "" if it may teach something.

    A column of ids has another value in each row: words, or the numbers of rows.
    """
    there = values[values != np.array(None)] if values.dtype == object else values[~np.isnan(values)]
    num = len(set(there.tolist()))
    if num <= 1 and len(there) == len(values):
        return "has the same value in every row"
    if not len(there):
        return "has no values"
    if kind == "word" and num > 50 and num > len(there) / 2:
        return f"has {num:,} different words in {len(there):,} rows"
    bare = name.lower().replace("_", "").replace(" ", "").replace(".", "")
    is_named = bare in _ID_NAMES or bare.startswith("unnamed") or bare.endswith("id")
    if kind == "number" and num == len(values) > 2:
        steps = np.diff(values)
        if bool((steps == 1).all()) or (is_named and bool((values % 1 == 0).all())):
            return "numbers the rows"
    return "" if name else "has no name"
