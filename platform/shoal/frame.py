"""Named frames as arrays: columns by their names, dates and missing values as numbers, all else refused by name.

A frame is a pandas DataFrame with names, or an Arrow table. Its columns have no order that means anything, so whoever
takes one names the columns that it wants, or is given the frame's own. Called wherever a user's values are taken: few
rows, clients, trees, replayed streams. Imports neither pandas nor pyarrow: who has a frame has imported them.
"""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any

import numpy as np

from shoal.errors import DataError

REMEDY = "give its values numbers, or leave the column out"
# Texts that are no value, as in Arrow and pandas; and in small letters those of columns of numbers, dates and truths.
GAPS = ["", *"#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|n/a|nan|null".split("|")]  # noqa: SIM905
MARKS = {*map(str.lower, GAPS), *"none|-|--|–|—|?|.|n.a.|k.a.|inf|-inf".split("|")}  # noqa: RUF001, SIM905
_DAYS = "%Y/%m/%d|%m/%d/%Y|%d/%m/%Y|%d.%m.%Y|%d.%m.%y|%d-%m-%Y|%m-%d-%Y|%m/%d/%y|%d/%m/%y|%b %d %Y|%b %d, %Y|%d %b %Y"
# Of dates, besides ISO 8601 ("").
DATE_FORMATS = [f"{day}{time}" for day in _DAYS.split("|") for time in ("", " %H:%M", " %H:%M:%S", " %I:%M %p")]
CLEAR_DATE_FORMATS = ("", "%d.%m.%Y", "%Y/%m/%d")  # those of one meaning: 03/04/2025 has two
NUMBER_FORMS = {  # of texts, by the decimal sign; "": as programs write them, without groups of thousands
    "": r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?",
    ",": r"[-+]?(\d+|[1-9]\d{0,2}([.\s'’]\d{3})+)(,\d+)?",  # noqa: RUF001
    ".": r"[-+]?(\d+|[1-9]\d{0,2}([,\s'’]\d{3})+)(\.\d+)?",  # noqa: RUF001
}
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def find_names(values: Any) -> list[str] | None:
    """The names of a frame's columns; None of everything else, also of a DataFrame whose columns are only numbered."""
    if _is_arrow(values):
        return list(values.column_names)
    if not _is_of("pandas", values, "DataFrame") or list(values.columns) == list(range(len(values.columns))):
        return None
    return [str(name) for name in values.columns]


def to_floats(field: str, values: Any, columns: Sequence[str] | None = None) -> np.ndarray:
    """Values as float64: a frame or a table [rows, columns], a pandas Series [rows], all else as NumPy has it.

    columns: what the columns of a frame must be, in the order of the result; None: its own ones, in theirs

    Dates become seconds since 1970 (UTC where they have no zone), durations seconds, missing values NaN. Categories
    become numbers where they are. Raises DataError with `field`, which names the columns that are missing or
    unexpected, or the column and row of what is no number.
    """
    if _is_of("pandas", values, "Series"):
        return _convert_column(field, str(values.name), values)
    names = find_names(values)
    if names is not None:
        require_columns(field, names, names if columns is None else columns)
    elif _is_of("pandas", values, "DataFrame"):
        names, columns = [str(at) for at in range(values.shape[1])], None
    else:
        return _convert_array(field, values)
    read = values.column if _is_arrow(values) else lambda at: values.iloc[:, at]
    result = [_convert_column(field, name, read(names.index(name))) for name in columns or names]
    return np.stack(result, 1) if result else np.zeros((len(values), 0))


def list_rows(values: Any, columns: Collection[str]) -> list[Any]:
    """A frame as its rows, each a dict of those `columns` that it has, None for missing values; all else as a list."""
    if _is_arrow(values):
        return list(values.select([name for name in values.column_names if name in columns]).to_pylist())
    if _is_of("pandas", values, "DataFrame"):
        values = values.loc[:, values.columns.isin(columns)]
        return list(values.astype(object).where(values.notna(), None).to_dict("records"))
    return list(values)


def select_columns(values: Any, columns: Sequence[str]) -> np.ndarray:
    """The columns of a frame, as NumPy has their values: [rows, columns]."""
    if _is_arrow(values):
        return np.stack([np.asarray(values.column(name).to_pylist()) for name in columns], 1)
    names = find_names(values) or []
    chosen: np.ndarray = values.iloc[:, [names.index(name) for name in columns]].to_numpy()
    return chosen


def require_columns(field: str, names: Sequence[str], columns: Sequence[str]) -> None:
    """Raises DataError unless a frame's `names` are `columns`, in any order."""
    if twice := [name for at, name in enumerate(names) if name in names[:at]]:
        raise DataError(field, twice[0], "names two columns", "give each column a name of its own")
    missing = [name for name in columns if name not in names]
    unexpected = [name for name in names if name not in columns]
    if missing or unexpected:
        parts = [f"{what} {', '.join(map(repr, each))}" for what, each in
                 (("lacks", missing), ("has the unexpected", unexpected)) if each]  # fmt: skip
        remedy = f"the columns are {', '.join(columns)}, in any order"
        raise DataError(field, (missing or unexpected)[0], f"the frame {' and '.join(parts)}", remedy)


def require_equal_rows(X: Any, y: Any) -> None:
    """Raises DataError if both are of pandas, and their rows are not the same ones in the same order."""
    if _has_index(X) and _has_index(y) and not y.index.equals(X.index):
        problem = "its rows have another index than those of X"
        raise DataError("y", _show_index(y), problem, "bring both into one order, or use reset_index(drop=True)")


def require_row_order(field: str, values: Any) -> None:
    """Raises DataError if it is of pandas, and its rows are no longer in the order of their index."""
    if _has_index(values) and not (values.index.is_monotonic_increasing and values.index.is_unique):
        problem = "its index is not in order, and rows are taken in order"
        remedy = "sort_index() if the index numbers the rows, else reset_index(drop=True)"
        raise DataError(field, _show_index(values), problem, remedy)


def unwrap_rows(field: str, values: Any) -> Any:
    """A Series or DataFrame as an array of its rows, which must be in the order of their index; all else unchanged.

    Numbers keep their type. Raises DataError as `require_row_order` and `to_floats`.
    """
    if not _has_index(values):
        return values
    require_row_order(field, values)
    array = values.to_numpy()
    return array if array.dtype.kind in "biuf" else to_floats(field, values)


def _convert_array(field: str, values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
        if array.dtype.kind in "mM":
            return _to_seconds(array)
        if array.dtype.kind == "O":
            return np.array(_convert_all(field, "values", array.ravel().tolist())).reshape(array.shape)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"it is {array.dtype}")
        return array.astype(np.float64)
    except (TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            field, type(values).__name__, f"is no array of numbers: {error}", "give rows of numbers"
        ) from None


def _convert_column(field: str, name: str, column: Any) -> np.ndarray:
    if not _is_of("pandas", column, "Series"):
        return _convert_arrow(field, name, column)
    if _is_of("pandas", column.dtype, "ArrowDtype"):  # of dates, pandas does not know as much
        return _convert_arrow(field, name, column.array.__arrow_array__())
    kind = getattr(column.dtype, "kind", "O")
    if kind in "mM":
        has_zone = kind == "M" and column.dt.tz is not None
        return _to_seconds((column.dt.tz_convert(None) if has_zone else column).to_numpy())
    if kind in "biuf":
        return np.array(column.to_numpy(np.float64, na_value=np.nan))
    return _convert_all(field, name, column.tolist())


def _convert_arrow(field: str, name: str, column: Any) -> np.ndarray:
    arrow = sys.modules["pyarrow"]
    types, kind = arrow.types, column.type
    if isinstance(column, arrow.Array):  # of a RecordBatch
        column = arrow.chunked_array([column])
    if types.is_date(kind) or types.is_timestamp(kind) or types.is_duration(kind):
        unit = "s" if types.is_date(kind) else kind.unit
        numpy_kind = f"timedelta64[{unit}]" if types.is_duration(kind) else f"datetime64[{unit}]"
        return _to_seconds(np.array(column.to_numpy(), numpy_kind))
    if types.is_integer(kind) or types.is_floating(kind):
        return np.array(column.to_numpy(), np.float64)
    return _convert_all(field, name, column.to_pylist())


def _convert_all(field: str, name: str, values: Iterable[Any]) -> np.ndarray:
    """Values one by one, each of any type."""
    result = []
    for row, value in enumerate(values):
        number = to_number(value)
        if number is None:
            raise DataError(field, name, f"row {row} has {value!r}, which is no number", REMEDY)
        result.append(number)
    return np.array(result, np.float64)


def to_number(value: Any) -> float | None:
    """A value that may be missing (NaN), a date or a duration, as a number; None for what has none."""
    if value is None or any(value is getattr(sys.modules.get("pandas"), name, None) for name in ("NA", "NaT")):
        return np.nan
    if isinstance(value, bool | int | float | Decimal | np.bool_ | np.integer | np.floating):
        try:
            return float(value)
        except OverflowError:  # an int beyond float64
            return None
    if isinstance(value, datetime.datetime):
        return (value if value.tzinfo else value.replace(tzinfo=datetime.UTC)).timestamp()
    if isinstance(value, datetime.date):
        return (datetime.datetime(value.year, value.month, value.day, tzinfo=datetime.UTC) - EPOCH).total_seconds()
    return value.total_seconds() if isinstance(value, datetime.timedelta) else None


def parse_number(text: str, point: str = "") -> float | None:
    """A cell of a file as a number, NaN for a gap, None for what is none. `point`: the form, see NUMBER_FORMS."""
    bare = text.strip()
    if re.fullmatch(NUMBER_FORMS[point], bare):
        return float(re.sub(rf"[^-+\d{point}]", "", bare).replace(",", ".") if point else bare)
    return np.nan if bare.lower() in MARKS else None


def parse_date(text: str, forms: Iterable[str]) -> float | None:
    """A cell of a file as seconds since 1970, by the first of the forms that fits; NaN for a gap, None for no date."""
    bare = text.strip()
    for form in forms:
        with suppress(ValueError):
            time = datetime.datetime.strptime(bare, form) if form else datetime.datetime.fromisoformat(bare)
            return to_number(time)
    return np.nan if bare.lower() in MARKS else None


def parse_cell(kind: str, text: str) -> float | None:
    """A cell of a column of numbers or dates, as `number:,` and `date:%d.%m.%Y`; NaN for a gap, None for neither."""
    word, _, form = kind.partition(":")
    return parse_date(text, (form, *CLEAR_DATE_FORMATS)) if word == "date" else parse_number(text, form)


def list_text_kinds(cells: Iterable[str]) -> list[str]:
    """The kinds of which all cells are that are no gaps, [] where all are: numbers, as programs write them first, else
    dates, else words. Codes with leading zeros, as 01234, are words."""
    texts = [each for each in cells if each.strip().lower() not in MARKS]
    if any(re.fullmatch(r"\s*0\d+\s*", each) for each in texts):
        return ["word"]
    if not texts or all(each.strip().lower() in ("true", "false") for each in texts):
        return ["truth"] * bool(texts)
    numbers, dates = ["number", "number:,", "number:."], [f"date:{form}" for form in DATE_FORMATS]
    dates = [each for each in dates if parse_date(texts[0], [each[5:]]) is not None] or ["date"]
    for kinds in (numbers, dates, ["date"]):
        if fitting := [kind for kind in kinds if all(parse_cell(kind, each) is not None for each in texts)]:
            return fitting
    return ["word"]


def _to_seconds(times: np.ndarray) -> np.ndarray:
    """Of datetime64 or timedelta64 of any unit, NaN for NaT."""
    since = times - np.datetime64(0, "s") if times.dtype.kind == "M" else times
    seconds: np.ndarray = since / np.timedelta64(1, "s")
    return seconds


def _is_of(library: str, values: Any, *kinds: str) -> bool:
    """Whether it is an instance of one of some classes of a library that may not be imported."""
    return any(isinstance(values, getattr(sys.modules.get(library), kind, ())) for kind in kinds)


def _is_arrow(values: Any) -> bool:
    return _is_of("pyarrow", values, "Table", "RecordBatch")


def _has_index(values: Any) -> bool:
    return _is_of("pandas", values, "Series", "DataFrame")


def _show_index(values: Any) -> str:
    shown = ", ".join(map(str, values.index[:4]))
    return shown + (", ..." if len(values.index) > 4 else "")
