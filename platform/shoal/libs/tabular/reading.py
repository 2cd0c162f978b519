"""Reads a table, and the values of its columns, each of a kind: number, word, date or truth.

Called by `table`. Kinds are inferred from Arrow's types, and from texts that are all numbers, dates or truths but for
gaps. A kind may say how a text is read: `date:%d.%m.%Y`, `number:,` with the decimal sign. Fits nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, Literal, get_args

import numpy as np

from shoal.errors import ConfigError, DataError, needs_extra
from shoal.frame import NUMBER_FORMS, list_text_kinds, parse_cell
from shoal.libs.tabular.encoders import to_values
from shoal.open_inference.tables import START_BYTES, csv_options, is_text, match_numbers, read_column
from shoal.store import fetch, locate

with needs_extra("data"):
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import csv, parquet

Kind = Literal["number", "word", "date", "truth"]
Values = np.ndarray  # [N]: float64 with NaN for gaps (dates in seconds since 1970), or str with None for gaps

NUM_SEEN = 1000  # different texts, read one by one for the kinds that they may be of
_ID_NAMES = ("id", "index", "rownames", "rowid", "uuid", "key", "")


def read_table(data: Any, field: str = "data", known: Collection[str] = ()) -> pa.Table:
    """A table from a file (CSV, TSV, Parquet), a URL of the store, a DataFrame, an Arrow table, or columns by name.

    known: columns that were named, by which a file's line of names is known

    Raises DataError, and ConfigError for what is no table.
    """
    if isinstance(data, str | Path):
        found = _read_file(data, field, known)
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


def _read_file(data: str | Path, field: str, known: Collection[str]) -> pa.Table:
    path, shown = locate(data, field), str(data)
    if not path.is_file():
        remedy = f"paths are looked up from {Path.cwd()}"
        raise DataError(field, shown, "is a folder" if path.is_dir() else "does not exist", remedy)
    fetch([path])
    try:
        with path.open("rb") as file:
            if file.read(4) == b"PAR1":
                return parquet.read_table(str(path))
        with pa.input_stream(str(path)) as file:  # a compressed one is decompressed
            content = file.read()
        content.decode()  # Arrow takes other encodings for bytes without a meaning
        return csv.read_csv(pa.py_buffer(content), **csv_options(content[:START_BYTES], known))
    except (pa.ArrowException, UnicodeDecodeError) as error:
        remedy = "give a CSV file in UTF-8 with a line of names, or a Parquet file"
        raise DataError(field, shown, f"cannot be read as a table: {error}", remedy) from error


def list_kinds(column: pa.ChunkedArray) -> list[str]:
    """The kinds that a column may be of, [] for a type without one: several where its texts can be read in several
    ways, that of programs' numbers first."""
    kind, types = column.type, pa.types
    if types.is_boolean(kind):
        return ["truth"]
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_duration(kind):
        return ["number"]
    if types.is_date(kind) or types.is_timestamp(kind):
        return ["date"]
    if not is_text(column):
        return []
    texts = column.unique().drop_null()
    found, rest = list_text_kinds(texts.slice(0, NUM_SEEN).to_pylist()), texts.slice(NUM_SEEN)
    codes = pc.any(pc.match_substring_regex(rest, r"^\s*0\d+\s*$")).as_py()
    return [each for each in found if not codes and _fits(each, rest)] or ["word"]


def _fits(kind: str, texts: pa.Array) -> bool:
    word, _, form = kind.partition(":")
    if word == "number":
        texts = texts.filter(pc.invert(match_numbers(texts, form)))
    return all(parse_cell(kind, each) is not None for each in texts.to_pylist())


def choose_kinds(full: pa.Table, names: Sequence[str], explicit: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The kind of each column, "" for a type without one, and a remark where it is not clear.

    An `explicit` one without a form gets that of the texts. Of several forms, a column has that of another column of
    the file in which it is the only one.
    """
    found, chosen = {name: list_kinds(full.column(name)) for name in names}, dict[str, tuple[str, str]]()
    sure = {kinds[0] for kinds in found.values() if len(kinds) == 1}
    for name, kinds in found.items():
        best = [each for each in kinds if each in sure] or kinds
        word = explicit.get(name, "")
        if word:
            fitting = [each for each in best if each.startswith(f"{word}:")]
            chosen[name] = fitting[0] if len(fitting) == len(best) == 1 else word, ""
        elif len(best) > 1 and kinds[0] != "number":
            shown = " or ".join(best)
            chosen[name] = "word", f"may be {shown}: say which, as in {quote(f'columns.{name}={best[0]}')}"
        elif best:
            chosen[name] = best[0] if len(best) == 1 else kinds[0], ""
        else:
            chosen[name] = "", f"left out: {full.column(name).type} is no number, word, date or truth"
    return chosen


def extract_values(name: str, column: pa.ChunkedArray, kind: str) -> Values:
    """The values of a column as of a kind, read as those of a request. Raises DataError naming the column and a value
    that is not of it."""
    word, _, form = kind.partition(":")
    if word not in get_args(Kind) or (form and word != "date" and not (word == "number" and form in NUMBER_FORMS)):
        remedy = f"one of {', '.join(get_args(Kind))}, or date:%d.%m.%Y, number:, and number:. for decimal signs"
        raise ConfigError(f"columns.{name}", kind, "is no kind of column", remedy)
    try:
        return to_values(name, kind, read_column(column.combine_chunks(), name, kind))
    except DataError as error:
        remedy = f"say another kind, as in {quote(f'columns.{name}=word')}, or leave_out=[{name}]"
        raise DataError("column", name, f"has a value that is no {kind}: {error}", remedy) from error


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
    are_codes = kind == "word" and all(map(str.isdecimal, there.tolist()))
    if kind == "word" and not are_codes and num > 50 and num > len(there) / 2:
        return f"has {num:,} different words in {len(there):,} rows"
    bare = name.lower().replace("_", "").replace(" ", "").replace(".", "")
    is_named = bare in _ID_NAMES or bare.startswith("unnamed") or bare.endswith("id")
    if (kind.startswith("number") or are_codes) and num == len(values) > 2:
        numbers = values.astype(np.float64)
        if bool((np.diff(numbers) == 1).all()) or (is_named and bool((numbers % 1 == 0).all())):
            return "numbers the rows"
    return "" if name else "has no name"
