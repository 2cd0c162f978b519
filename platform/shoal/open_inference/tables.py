"""Converts between tables and a model's tensors: columns to inputs, outputs to columns.

Called by `shoal predict` and by batch prediction, so that both treat a table alike. Pure functions of Arrow tables and
arrays; reads and writes no file, and calls no model.

    an input `x` is             the column `x`, of numbers, strings, lists or tensors, when the table has one
                                the columns that were named for it, side by side
                                the columns that the model names, in its order
                                all columns, for the only input of a model whose rows have as many values
    an input of a `kind`        its column alone, in which nulls and, for no words, empty texts are gaps
    an output `y` becomes       the column `y`: of numbers for [rows] and [rows, 1], of lists for more, of structs where
                                its columns have names, as classes have
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

import numpy as np

from shoal.errors import DataError, needs_extra
from shoal.frame import DATE_FORMATS, GAPS, MARKS, NUMBER_FORMS, parse_date, parse_number
from shoal.frame import to_floats as to_floats64
from shoal.open_inference.datatypes import NUMPY_DTYPES, bf16_values, to_floats
from shoal.open_inference.messages import TensorDescription, describe_tensor
from shoal.open_inference.rows import decode_column

with needs_extra("data"):
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.csv

SEPARATORS = (",", "\t", ";", "|")
START_BYTES = 1 << 20  # of a file, which have its names
_ROWS_BELOW = 10  # the first line, whose cells tell names from values
csv.field_size_limit(START_BYTES)  # of one cell, as of a text, or of a quote that the beginning cuts
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def parse_columns(arguments: Sequence[str], inputs: Sequence[TensorDescription]) -> dict[str, list[str]]:
    """Parse the columns for each input, from `a,b,c` (for the only input) and `x=a,b,c`. Raises DataError."""
    said: dict[str, list[str]] = {}
    names = [each.name for each in inputs]
    for argument in arguments:
        name, is_named, columns = argument.rpartition("=")
        if not is_named and len(names) > 1:
            raise DataError("columns", argument, "does not say for which input", f"write {names[0]}={argument}")
        name = name if is_named else names[0]
        if name not in names:
            raise DataError("columns", argument, f"the model has no input {name!r}", f"inputs: {', '.join(names)}")
        said[name] = [column.strip() for column in columns.split(",") if column.strip()]
    return said


def choose_columns(
    inputs: Sequence[TensorDescription], there: Sequence[str], columns_by_input: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Choose the columns for each input from those `there`. Raises DataError naming the missing one."""
    chosen: dict[str, list[str]] = {}
    for spec in inputs:
        columns = list(columns_by_input.get(spec.name, [spec.name] if spec.name in there else spec.columns))
        if sorted(columns) == sorted(spec.columns):
            columns = spec.columns  # names say more than an order
        if not columns and len(inputs) == 1 and math.prod(spec.shape[1:]) == len(there):
            columns = list(there)
        if not columns:
            remedy = f"say which: --columns {spec.name}=a,b,... of {', '.join(there)}"
            raise DataError("columns", spec.name, f"no column makes this input, {describe_tensor(spec)}", remedy)
        missing = [column for column in columns if column not in there]
        if missing:
            lacks = "is not in the table" if len(missing) == 1 else f"and {len(missing) - 1} more are not in the table"
            raise DataError("columns", missing[0], lacks, f"it has {', '.join(there)}")
        if twice := [column for column in columns if there.count(column) > 1]:
            raise DataError("columns", twice[0], "is in the table more than once", "give each column its own name")
        chosen[spec.name] = columns
    return chosen


def build_inputs(
    table: pa.Table, inputs: Sequence[TensorDescription], chosen: Mapping[str, Sequence[str]], first_row: int = 0
) -> dict[str, np.ndarray]:
    """Build the arrays [rows, ...] of the inputs from the chosen columns.

    first_row: the number of its first row in the full table

    Raises DataError naming the column and the first row that does not fit.
    """
    return {spec.name: _input(table, spec, chosen[spec.name], first_row) for spec in inputs}


def split_by_length(
    table: pa.Table, inputs: Sequence[TensorDescription], chosen: Mapping[str, Sequence[str]]
) -> list[pa.Table]:
    """Split the table into slices whose rows have lists of equal length, where an input has an open dimension."""
    columns = [column for spec in inputs if -1 in spec.shape[1:] for column in chosen[spec.name]]
    sizes = [level for column in columns for level in _list_row_sizes(_column(table, column))]
    has_changed = np.zeros(max(len(table) - 1, 0), bool)
    for of_row in sizes:
        has_changed |= of_row[1:] != of_row[:-1]
    bounds = [0, *(np.flatnonzero(has_changed) + 1).tolist(), len(table)]
    return [table.slice(start, stop - start) for start, stop in pairwise(bounds)]


def csv_options(start: bytes, known: Collection[str] = ()) -> dict[str, Any]:
    """How Arrow reads a CSV file of this beginning: every cell as the text that it is. The separator is the commonest
    of the first line; of a file without a line of names, the columns are 0, 1, ... A line with a `known` name is one
    of names."""
    text = start.decode("utf-8-sig", "replace")
    line = re.sub(r'"[^"]*"', "", text).partition("\n")[0]
    separator = max(SEPARATORS, key=line.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    names = next(reader, [])
    given = None if _are_names(names, [*islice(reader, _ROWS_BELOW)], known) else [str(at) for at in range(len(names))]
    return {
        "read_options": pa.csv.ReadOptions(use_threads=False, block_size=1 << 24, column_names=given),
        "parse_options": pa.csv.ParseOptions(delimiter=separator, newlines_in_values=True),
        "convert_options": pa.csv.ConvertOptions(column_types=dict.fromkeys(given or names, pa.string())),
    }


def _are_names(cells: Sequence[str], below: Sequence[Sequence[str]], known: Collection[str]) -> bool:
    """Whether a file's first line names its columns: it has a known name, or a cell of another kind than each below it.
    Else no cell is a number or a date, or the numbers count up, as years do, and no cell is there twice."""
    if {*known} & {*cells}.difference(map(str, range(len(cells))), [""]):
        return True
    for cell, *column in zip(cells, *(row for row in below if len(row) == len(cells)), strict=True):
        if (kinds := {*map(_kind, column)} - {""}) and _kind(cell) not in {"", *kinds}:
            return True
    values = [cell.strip() for cell in cells if _kind(cell) in ("number", "date")]
    if not values or len({*cells}) < len(cells) or not all(map(str.isdecimal, values)):
        return not values
    steps = {int(second) - int(first) for first, second in pairwise(values)}
    return len(steps) < 2 and steps <= {*range(1, 11)}


def _kind(cell: str) -> str:
    """number, date, word, or "" for a gap."""
    if cell.strip().lower() in MARKS:
        return ""
    if any(parse_number(cell, form) is not None for form in NUMBER_FORMS):
        return "number"
    return "date" if re.search(r"\d", cell) and parse_date(cell, ["", *DATE_FORMATS]) is not None else "word"


def column_type(spec: TensorDescription) -> pa.DataType:
    """The type of this output's column: a number, bytes, a list (of fixed length where its shape is), or a struct of
    its named columns."""
    if spec.datatype == "BYTES":
        value = pa.binary()
    else:
        value = pa.from_numpy_dtype(np.float32 if spec.datatype == "BF16" else NUMPY_DTYPES[spec.datatype])
    sizes = spec.shape[1:]
    if spec.columns and len(sizes) == 1:
        return pa.struct(dict.fromkeys(spec.columns, value))
    if -1 in sizes:
        return pa.list_(value)
    return value if math.prod(sizes) == 1 else pa.list_(value, math.prod(sizes))


def to_column(spec: TensorDescription, array: np.ndarray) -> pa.Array:
    """Convert an output [rows, ...] to a column of `column_type(spec)`."""
    rows = len(array)
    flat = (bf16_values(array) if spec.datatype == "BF16" else array).reshape(-1)
    wanted = column_type(spec)
    if pa.types.is_struct(wanted):
        columns = flat.reshape(rows, len(spec.columns)).T
        return pa.StructArray.from_arrays([pa.array(each, wanted[0].type) for each in columns], fields=[*wanted])
    if pa.types.is_list(wanted):
        size = flat.size // rows if rows else 0
        offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * size)
        return pa.ListArray.from_arrays(offsets, pa.array(flat, wanted.value_type))
    if pa.types.is_fixed_size_list(wanted):
        return pa.FixedSizeListArray.from_arrays(pa.array(flat, wanted.value_type), wanted.list_size)
    return pa.array(flat, wanted)


def _input(table: pa.Table, spec: TensorDescription, columns: Sequence[str], first_row: int) -> np.ndarray:
    parts = [_values(table, column, spec, first_row) for column in columns]
    rows = len(table)
    array = parts[0] if len(parts) == 1 else np.stack(parts, axis=1)
    shape = [rows, *spec.shape[1:]]
    if not rows:
        return array.reshape([0 if size == -1 else size for size in shape])
    if array.ndim == len(shape) and all(want in (-1, have) for have, want in zip(array.shape, shape, strict=True)):
        return array
    wanted = math.prod(shape)
    if shape.count(-1) > 1:
        given = f"{', '.join(columns)} give {list(array.shape[1:])}"
        problem = f"{given} for each row of this input, {describe_tensor(spec)}"
        raise DataError("columns", spec.name, problem, "give it a column of lists of lists")
    if array.size != wanted if -1 not in shape else wanted == 0 or array.size % abs(wanted):
        each = array.size // rows if rows else 0
        problem = f"{', '.join(columns)} give {each} values for each row of this input, {describe_tensor(spec)}"
        raise DataError("columns", spec.name, problem, "choose the columns with --columns")
    return array.reshape(shape)


def _column(table: pa.Table, name: str) -> pa.Array:
    """A column; of tensors, Arrow's own or Ray Data's, as their lists."""
    values = table.column(name).combine_chunks()
    if isinstance(values, pa.FixedShapeTensorArray) and not values.null_count:  # in the order of its dimensions
        flat = pa.array(np.ascontiguousarray(values.to_numpy_ndarray()).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, math.prod(values.type.shape))
    while isinstance(values.type, pa.BaseExtensionType):
        values = values.storage
    return values


def read_column(values: pa.Array, column: str, kind: str, first_row: int = 0) -> np.ndarray:
    """A table's column [rows] as of a kind: its cells are read as those of a row, each different one once. Raises
    DataError."""
    if kind != "word" and pa.types.is_primitive(values.type):
        return to_floats64("column", pa.table({column: values}))[:, 0]
    if pa.types.is_nested(values.type):
        return decode_column(column, kind, values.to_pylist(), first_row)
    try:
        if (
            kind == "number"
            and is_text(values)
            and (plain := match_numbers(values).to_numpy(zero_copy_only=False)).any()
        ):
            numbers: np.ndarray = (
                pa.compute.if_else(plain, values, "nan").to_numpy(zero_copy_only=False).astype(np.float64)
            )
            numbers[~plain] = read_column(values.filter(~plain), column, kind)
            return numbers
        cells = values if pa.types.is_dictionary(values.type) else pa.compute.dictionary_encode(values)
        read = decode_column(column, kind, [*cells.dictionary.to_pylist(), None])
    except (DataError, pa.ArrowNotImplementedError):  # of lists
        return decode_column(column, kind, values.to_pylist(), first_row)  # names the row
    found: np.ndarray = read[pa.compute.fill_null(cells.indices, len(read) - 1).to_numpy(zero_copy_only=False)]
    return found


def match_numbers(texts: pa.Array, form: str = "") -> pa.Array:
    """Which texts are numbers of a form, without blanks around them: many at once, as `parse_number` reads each."""
    found = pa.compute.match_substring_regex(texts, f"^({NUMBER_FORMS[form]})$")
    return pa.compute.fill_null(found, fill_value=False)


def is_text(values: pa.Array) -> bool:
    kind, types = values.type, pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _values(table: pa.Table, column: str, spec: TensorDescription, first_row: int) -> np.ndarray:
    """The array [rows, ...], with a dimension for each level of nested lists."""
    values, sizes = _column(table, column), [len(table)]
    if spec.kind:
        return read_column(values, column, spec.kind, first_row)
    if is_text(values) and spec.datatype != "BYTES":
        values = pa.compute.if_else(pa.compute.is_in(values, pa.array(GAPS)), None, values)
    _require_no_nulls(values, column, len(table), first_row)
    try:
        while any(is_list(values.type) for is_list in _LISTS):
            lengths = np.unique(pa.compute.list_value_length(values).to_numpy(zero_copy_only=False))
            if len(lengths) > 1:
                problem = f"its lists have from {lengths[0]} to {lengths[-1]} values"
                raise DataError("column", column, problem, f"the input is {describe_tensor(spec)}")
            values = values.flatten()
            _require_no_nulls(values, column, len(table), first_row)
            sizes.append(int(lengths[0]) if len(lengths) else 0)
        if pa.types.is_nested(values.type):
            raise ValueError(f"it has values of type {values.type}")
        if spec.datatype == "BYTES":
            words = np.empty(len(values), dtype=object)
            words[:] = [each if isinstance(each, bytes) else str(each).encode() for each in values.to_pylist()]
            return words.reshape(sizes)
        return _numbers(values, spec.datatype).reshape(sizes)
    except DataError:
        raise
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        row = f"row {first_row + _find_first_bad(values, spec) * len(table) // len(values)} " if len(table) > 1 else ""
        raise DataError("column", column, f"{row}cannot be {spec.datatype}: {error}", "choose another column") from None


def _list_row_sizes(values: pa.Array) -> list[np.ndarray]:
    """For each level of nested lists, [rows]: the number of elements of the row's list, or of its first inner list."""
    sizes: list[np.ndarray] = []
    first = np.arange(len(values))  # the first of each row among the values of this depth
    while any(is_list(values.type) for is_list in _LISTS):
        lengths = pa.compute.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
        begins = np.concatenate([[0], np.cumsum(lengths)])
        is_there = first < len(lengths)  # an empty list may be the last one
        sizes.append(np.where(is_there, lengths[np.where(is_there, first, 0)], 0) if len(lengths) else 0 * first)
        first = begins[np.minimum(first, len(lengths))]
        values = values.flatten()
    return sizes


def _find_first_bad(values: pa.Array, spec: TensorDescription) -> int:
    """The index of the first value that the input's type cannot represent."""
    low, high = 0, len(values)  # those before `low` fit, those before `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        try:
            _numbers(values.slice(low, middle - low), spec.datatype)
            low = middle
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            high = middle
    return low


def _require_no_nulls(values: pa.Array, column: str, num_rows: int, first_row: int) -> None:
    """Check that no row lacks a value. Raises DataError naming the row that does."""
    if values.null_count:
        row = first_row + values.is_null().index(True).as_py() * num_rows // len(values)
        which = f"row {row} " if num_rows > 1 else ""
        raise DataError("column", column, f"{which}has no value", "fill it, or leave the row out")


def _numbers(values: pa.Array, datatype: str) -> np.ndarray:
    """Convert integers and booleans exactly, floats to the nearest. Raises the errors of Arrow and NumPy."""
    if pa.types.is_temporal(values.type):
        if datatype != "FP64" or pa.types.is_time(values.type):
            raise ValueError("dates become seconds since 1970, which only an input of FP64 holds")
        return to_floats64("column", pa.table({"times": values}))[:, 0]
    is_truth = datatype != "BOOL" or pa.types.is_boolean(values.type)
    if not is_truth and pa.compute.any(_mask_non_boolean(values)).as_py():
        raise ValueError("there are numbers other than 0 and 1")
    if datatype != "BF16" and NUMPY_DTYPES[datatype].kind in "iub":
        exact = values.cast(pa.from_numpy_dtype(NUMPY_DTYPES[datatype]), safe=True)
        whole: np.ndarray = exact.to_numpy(zero_copy_only=False)
        return whole
    numbers: np.ndarray = values.to_numpy(zero_copy_only=False)
    if numbers.dtype == object:  # of text, or decimals
        try:
            numbers = numbers.astype(np.float64)
        except ValueError:
            dates = [parse_date(str(each), [""]) for each in numbers]
            if datatype != "FP64" or None in dates:
                raise
            numbers = np.array(dates, np.float64)
    return to_floats(numbers, datatype)


def _mask_non_boolean(values: pa.Array) -> pa.Array:
    """Mark numbers other than 0 and 1, since Arrow reads all but 0 as true, even NaN. Marks no text, which Arrow parses
    itself."""
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        return pa.array([], pa.bool_())
    return pa.compute.invert(pa.compute.is_in(values, pa.array([0, 1], values.type)))
