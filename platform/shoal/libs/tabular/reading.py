"""Reads a table, and the values of its columns, each of a kind: number, word, date or truth.

Called by `table`. Kinds are inferred from Arrow's types, and from words that are all dates. Fits nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from shoal.errors import ConfigError, DataError, needs_extra
from shoal.open_inference.tables import find_separator
from shoal.store import fetch, locate

with needs_extra("data"):
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import csv, parquet

Kind = Literal["number", "word", "date", "truth"]
Values = np.ndarray  # [N]: float64 with NaN for gaps (dates in seconds since 1970), or str with None for gaps

_FORMATS = ("%Y/%m/%d", "%m/%d/%Y", "%d/%m/%Y", "%d.%m.%Y", "%b %d %Y", "%b %d, %Y")  # besides those of ISO 8601
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


def infer_kind(column: pa.ChunkedArray) -> Kind | None:
    """None for a column of another type, such as lists, or one of gaps alone."""
    kind, types = column.type, pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_boolean(kind):
        return "truth"
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_duration(kind):
        return "number"
    if types.is_date(kind) or types.is_timestamp(kind):
        return "date"
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "word" if _find_format(column) is None else "date"
    return None


def extract_values(name: str, column: pa.ChunkedArray, kind: str) -> Values:
    """The values of a column as of a kind. Raises DataError naming the column and a value that is not of it."""
    if kind.partition(":")[0] not in get_args(Kind):
        remedy = f"one of {', '.join(get_args(Kind))}, or date:%d.%m.%Y"
        raise ConfigError(f"columns.{name}", kind, "is no kind of column", remedy)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    try:
        if kind == "word":
            column = column if infer_kind(column) in ("word", "date") else _format_numbers(column)
            words: np.ndarray = column.cast(pa.string()).to_numpy(zero_copy_only=False).astype(object)
            words[words == ""] = None
            return words
        if kind.startswith("date"):
            column = _parse_dates(column, kind.partition(":")[2])
            return _to_floats(column.cast(pa.timestamp("us")).cast(pa.int64())) / 1e6
        if pa.types.is_duration(column.type):
            return _to_floats(column.cast(pa.duration("us")).cast(pa.int64())) / 1e6
        values = _to_floats(column.cast(pa.bool_()) if kind == "truth" else column)
        values[~np.isfinite(values)] = np.nan
        return values
    except pa.ArrowException as error:
        remedy = f"say another kind, as in columns.{name}=word, or leave_out=[{name}]"
        raise DataError("column", name, f"has a value that is no {kind}: {error}", remedy) from error


def _to_floats(column: pa.ChunkedArray) -> np.ndarray:
    values: np.ndarray = column.cast(pa.float64(), safe=False).to_numpy()
    return values.astype(np.float64)  # a copy, which may be written to


def _format_numbers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Numbers and truths as words: whole ones without a fraction."""
    if pa.types.is_floating(column.type) and pc.all(pc.equal(column, pc.round(column))).as_py():
        column = column.cast(pa.int64())
    return column.cast(pa.string())


def _parse_dates(column: pa.ChunkedArray, given: str) -> pa.ChunkedArray:
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return column
    form = given or _find_format(column)
    return column.cast(pa.timestamp("us")) if not form else pc.strptime(column, form, "us")


def _find_format(column: pa.ChunkedArray) -> str | None:
    """The format by which all words are dates; "" for ISO 8601, None where there is none or more than one."""
    sample = column.slice(0, 1000).drop_null()
    if not len(sample) or not pc.all(pc.match_substring_regex(sample, r"\d.*[-/. ,].*\d")).as_py():
        return None
    words = column.drop_null()
    fitting = [each for each in _FORMATS if not pc.strptime(words, each, "us", error_is_null=True).null_count]
    if fitting:
        return fitting[0] if len(fitting) == 1 else None
    try:
        words.cast(pa.timestamp("us"))
    except pa.ArrowInvalid:
        return None
    return ""


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
