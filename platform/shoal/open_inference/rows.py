"""Rows as people have them, objects with a field for each column, as a model's tensors, and its outputs as such rows.

Called by the endpoint's path `rows` and by programs that call a model in their own process. Pure functions of values
and arrays.

| an input                       | its fields, as in the file of training                     | a gap             |
|--------------------------------|------------------------------------------------------------|-------------------|
| of kind number                 | its name: a number or its text; "3,5" if it is number:,    | null, MARKS: NaN  |
| of kind truth                  | its name: true, false, 1, 0, or "yes", "no", "true", "1"   | null, MARKS: NaN  |
| of kind date, date:%m/%d/%Y    | its name: ISO 8601, 31.5.2025, 2025/05/31, 5/31/2025; 1e9  | null, MARKS: NaN  |
| of kind word                   | its name: a text, or a number as one                       | null, "": b""     |
| [rows, n] with `columns`       | each column: a number of the input's datatype              | an error          |
| any other, batch first         | its name: the values of one row, nested as its shape       | an error          |

A cell of a file is read by the same functions (`decode_column`), so a row of a file is a row of a request. Fields that
no input has are left out; one that is missing is an error: a DataError, `field` of which is the field's name.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np

from shoal.errors import MAX_SHOWN_LENGTH, DataError, InferenceError
from shoal.frame import CLEAR_DATE_FORMATS, MARKS, parse_date, parse_number, to_number
from shoal.open_inference.datatypes import bf16_values
from shoal.open_inference.json_tensors import from_json, to_json
from shoal.open_inference.messages import TensorDescription, describe_tensor

Row = Mapping[str, Any]
_TRUTHS = {True: 1.0, "true": 1.0, "yes": 1.0, "1": 1.0, False: 0.0, "false": 0.0, "no": 0.0, "0": 0.0}  # 1 equals True
_PLAIN_NUMBERS = {int, float, type(None)}
_EXPECTED = {
    "number": "write a number, or null where it is not known",
    "truth": "write true or false, or null where it is not known",
    "date": "write it as 2025-05-31 or 2025-05-31T08:30:00Z, or null where it is not known",
    "word": "write a text in quotes, or null where it is not known",
}


def list_fields(inputs: Sequence[TensorDescription]) -> dict[str, str]:
    """The fields of a row and the kind of each; "" for one without gaps."""
    return {field: spec.kind for spec in inputs for field in _fields(spec)}


def decode_rows(inputs: Sequence[TensorDescription], rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Decode rows as the arrays [rows, ...] of the inputs. Raises DataError that names the field."""
    fields, rows = list_fields(inputs), list(rows)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError("row", row, "is no object", f"write one with the fields {', '.join(fields)}")
        if fields.keys() <= row.keys():
            continue
        rows[number] = {str(name).removeprefix("\ufeff"): value for name, value in row.items()}  # of a file's beginning
        if missing := [field for field in fields if field not in rows[number]]:
            remedy = "write null where it is not known" if fields[missing[0]] else "each row has a value for it"
            raise DataError(missing[0], "", f"{_name_row(number, rows)}is missing", remedy)
    return {spec.name: _decode_input(spec, rows) for spec in inputs}


def encode_rows(outputs: Sequence[TensorDescription], arrays: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Encode the given outputs as rows: of a number or text, of lists, or of objects where the output has columns.

    Numbers have the digits of their own datatype. Raises InferenceError (422) for BYTES that are not UTF-8.
    """
    values: dict[str, list[Any]] = {}
    for spec in outputs:
        if spec.name in arrays:
            values[spec.name] = _to_lists(spec, arrays[spec.name])
            if spec.columns and len(spec.shape) == 2:
                values[spec.name] = [dict(zip(spec.columns, each, strict=True)) for each in values[spec.name]]
    return [dict(zip(values, each, strict=True)) for each in zip(*values.values(), strict=True)]


def _fields(spec: TensorDescription) -> Sequence[str]:
    return spec.columns if spec.columns and len(spec.shape) == 2 else [spec.name]


def _shorten(value: Any) -> Any:
    return value[:MAX_SHOWN_LENGTH] if isinstance(value, str) else value


def _name_row(number: int, rows: Sequence[Any]) -> str:
    return f"row {number} " if len(rows) > 1 else ""


def decode_column(name: str, kind: str, values: Sequence[Any], first_row: int = 0) -> np.ndarray:
    """Decode the values of a column [rows]; None is a gap. `first_row`: its number, for an error that counts rows.

    Raises DataError that names the column.
    """
    if kind == "number" and _PLAIN_NUMBERS.issuperset(map(type, values)):
        try:
            return np.array(values, np.float64)  # None becomes NaN
        except OverflowError:  # an integer that no float64 holds
            pass
    kind, _, form = kind.partition(":")
    read, result = _READERS[kind], np.empty(len(values), object if kind == "word" else np.float64)
    for number, value in enumerate(values):
        found = read(value, form)
        if found is None:
            problem = f"{_name_row(number + first_row, values)}is no {kind}"
            shown = f" (training had {kind}:{form})" if form else ""
            raise DataError(name, _shorten(value), problem, _EXPECTED[kind] + shown)
        result[number] = found
    return result


def _decode_input(spec: TensorDescription, rows: Sequence[Row]) -> np.ndarray:
    if spec.kind:
        return decode_column(spec.name, spec.kind, [row[spec.name] for row in rows])
    names, remedy = _fields(spec), f"the input is {describe_tensor(spec)}"
    one = names == [spec.name]
    try:
        return _from_lists(spec, [row[spec.name] if one else [row[name] for name in names] for row in rows])
    except InferenceError as error:
        for number, row in enumerate(rows):
            for name in names:
                try:
                    _from_lists(spec, [row[name]])
                except InferenceError:
                    problem = f"{_name_row(number, rows)}is no {spec.datatype}"
                    raise DataError(name, _shorten(row[name]), problem, remedy) from None
        raise DataError(spec.name, "", error.message, remedy) from None


def _from_lists(spec: TensorDescription, values: Sequence[Any]) -> np.ndarray:
    shape, first = [len(values)], values[0]
    while isinstance(first, list | tuple):
        shape.append(len(first))
        first = first[0] if first else None
    return from_json(spec.name, spec.datatype, shape, msgspec.Raw(msgspec.json.encode(values)))


def _read_truth(value: Any, _: str) -> float | None:
    word = value.strip().lower() if isinstance(value, str) else value
    if not isinstance(word, Hashable):
        return None
    return math.nan if word is None or word in MARKS else _TRUTHS.get(word)


def _read_date(value: Any, form: str) -> float | None:
    if isinstance(value, str):
        return parse_date(value, (form, *CLEAR_DATE_FORMATS))
    return None if isinstance(value, bool) else to_number(value)


def _read_number(value: Any, point: str) -> float | None:
    if isinstance(value, str):
        return parse_number(value, point)
    is_date = isinstance(value, bool | datetime.date | datetime.timedelta)
    return None if is_date else to_number(value)


def _read_text(value: Any, _: str) -> bytes | None:
    if isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, float):
        value = None if math.isnan(value) else int(value) if value.is_integer() else value
    if isinstance(value, int | float | Decimal | datetime.date):
        value = str(value)
    if value is None or isinstance(value, bytes):
        return value or b""
    try:
        return value.strip().encode() if isinstance(value, str) else None
    except UnicodeEncodeError:  # half of a pair of surrogates
        return None


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "number": _read_number,
    "truth": _read_truth,
    "date": _read_date,
    "word": _read_text,
}


def _to_lists(spec: TensorDescription, array: np.ndarray) -> list[Any]:
    if spec.datatype == "BYTES":
        words = np.empty(array.size, object)
        words[:] = to_json(spec.name, "BYTES", array)
        array = words.reshape(array.shape)
    elif spec.datatype == "BF16":
        array = bf16_values(array)
    elif array.dtype.kind == "f" and array.itemsize < 8:
        array = array.astype("U").astype(np.float64)  # 0.93, not 0.9300000071525574
    values: list[Any] = array.tolist()
    return values
