"""The input of `shoal predict`: words, JSON, tables, images and arrays, as a model's inputs.

Called by the command alone. Every function returns arrays or lists [rows, ...] by input: lists of arrays where rows
differ in a variable dimension. DataError names the file or the word, and what would fit.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import DataError, needs_extra
from shoal.extend.serve import ArrayLike, decode_rows, is_integer, read_picture, summarize_error
from shoal.open_inference.messages import TensorDescription, TensorMetadata, describe_tensor

Inputs = Sequence[TensorDescription]
Arrays = dict[str, ArrayLike]
_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError)


def require_file(argument: str) -> None:
    """Raise DataError for a FILE, or an X=FILE, that is not there: before an endpoint is called for its inputs."""
    if not any(Path(each).exists() for each in (argument, argument.partition("=")[2] or argument)):
        raise DataError("file", argument, "is not there", f"paths are looked up from {Path.cwd()}")


def parse_arguments(arguments: Sequence[str], inputs: Inputs) -> Arrays:
    """`x=1,2,3`, `x=[[1, 2], [3, 4]]`, or without `x=` for the only input; repeated words for one input add rows.

    A text for BYTES is one value, commas and blanks included, unless it is a JSON list.
    """
    arrays: Arrays = {}
    for argument in arguments:
        spec, text = _split_target("input", argument, inputs)
        values = (
            _parse_json("input", argument, text)
            if text.lstrip().startswith("[")
            else _parse_values(argument, text, spec)
        )
        rows = _reshape_rows("input", argument, values, spec)
        if (before := arrays.get(spec.name)) is not None:
            rows = [*before, *rows]
            if len({np.shape(row) for row in rows}) > 1 and -1 not in spec.shape[1:]:
                problem = f"has rows of another shape than {spec.name}=... before it"
                raise DataError("input", argument, problem, f"the input is {describe_tensor(spec)}")
        arrays[spec.name] = rows
    return arrays


def from_rows(rows: Sequence[str], inputs: Inputs) -> Arrays:
    """JSON objects with a field for each column, or lists of them."""
    listed: list[Any] = []
    for row in rows:
        content = _parse_json("row", row, row)
        listed += content if isinstance(content, list) else [content]
    return {**decode_rows(inputs, listed)}


def add_rows(inputs: Inputs) -> list[TensorMetadata]:
    """The inputs of a model without a batch, with a dimension of rows ahead, each of which is a request."""
    return [TensorMetadata(spec.name, spec.datatype, [-1, *spec.shape], spec.columns, spec.kind) for spec in inputs]


def from_json(path: str, inputs: Inputs, *, has_rows: bool = True) -> Arrays:
    """An object of inputs, rows, or a request of the protocol; `-` is standard input.

    Rows are objects of inputs, or values of the only input.

    has_rows: whether the tensors of a request have rows, in dimension 0; else a request is one
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
    except (OSError, ValueError) as error:  # ValueError: not text, or a NUL in the name
        problem, remedy = f"cannot be read: {summarize_error(error)}", "give a file, or - for standard input"
        raise DataError("json", path, problem, remedy) from None
    content = _parse_json("json", path, text)
    if isinstance(content, dict) and isinstance(content.get("inputs"), list):
        return _parse_request(path, content["inputs"], has_rows)
    if any(spec.kind for spec in inputs):
        return {**decode_rows(inputs, content if isinstance(content, list) else [content])}
    if isinstance(content, dict):
        return _parse_named_inputs(path, content, inputs)
    if isinstance(content, list) and content and all(isinstance(row, dict) for row in content):
        return _parse_rows(path, content, inputs)
    if isinstance(content, list) and len(inputs) == 1:
        return {inputs[0].name: _reshape_rows("json", path, content, inputs[0])}
    lists, row = (", ".join(f'"{spec.name}": {dots}' for spec in inputs) for dots in ("[...]", "..."))
    remedy = f"write {{{lists}}} or [{{{row}}}, ...]; {_list_inputs(inputs)}"
    raise DataError("json", path, "is neither inputs nor rows", remedy)


def _parse_request(path: str, tensors: list[Any], has_rows: bool) -> Arrays:
    try:
        arrays = {
            each["name"]: np.array(each["data"], _choose_numpy_dtype(each.get("datatype"))).reshape(each["shape"])
            for each in tensors
        }
    except (KeyError, TypeError, ValueError) as error:
        raise DataError("json", path, f"is no request of the protocol: {error!r}") from None
    if not has_rows:
        return {name: array[None] for name, array in arrays.items()}
    if alone := [name for name, array in arrays.items() if not array.ndim]:
        raise DataError("json", path, f"the input {alone[0]!r} has the shape [], which has no rows", "give [rows, ...]")
    return {**arrays}


def _parse_named_inputs(path: str, content: Mapping[str, Any], inputs: Inputs) -> Arrays:
    specs = {spec.name: spec for spec in inputs}
    if unknown := [name for name in content if name not in specs]:
        raise DataError("json", path, f"the model has no input {unknown[0]!r}", _list_inputs(inputs))
    return {name: _reshape_rows("json", path, rows, specs[name]) for name, rows in content.items()}


def _parse_rows(path: str, rows: Sequence[Mapping[str, Any]], inputs: Inputs) -> Arrays:
    """One object for each row. Raises DataError when one differs from the first."""
    for number, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise DataError("json", path, f"row {number} has other inputs than row 0", "give each the same")
    arrays = _parse_named_inputs(path, {name: [row[name] for row in rows] for name in rows[0]}, inputs)
    for spec in inputs:
        if spec.name in arrays and len(arrays[spec.name]) != len(rows):
            problem = f"its {len(rows)} rows do not make {len(rows)} of the input {spec.name!r}"
            raise DataError("json", path, problem, f"the input is {describe_tensor(spec)}")
    return arrays


def from_table(path: Path, columns: Sequence[str], inputs: Inputs) -> Arrays:
    """Columns of a CSV or Parquet file; `open_inference.tables` defines which."""
    with needs_extra("data"):
        import pyarrow as pa
        import pyarrow.csv
        import pyarrow.parquet

    from shoal.open_inference.tables import (
        START_BYTES,
        build_inputs,
        choose_columns,
        csv_options,
        parse_columns,
        split_by_length,
    )

    named = parse_columns(columns, inputs)
    known = [name for spec in inputs for name in (spec.name, *spec.columns)]
    try:
        if path.suffix.lower() in (".csv", ".tsv", ".txt"):
            with path.open("rb") as file:
                options = csv_options(file.read(START_BYTES), known)
            table = pa.csv.read_csv(path, **options)
        else:
            table = pa.parquet.read_table(path, partitioning=None)  # a folder named day=3 is not a column
        chosen = choose_columns(inputs, table.column_names, named)
    except (OSError, pa.ArrowException) as error:
        problem = f"cannot be read: {summarize_error(error)}"
        raise DataError("file", str(path), problem, "give a CSV or a Parquet file") from None
    if not len(table):
        raise DataError("file", str(path), "has no rows", "there is nothing to predict")
    parts, row = [], 0
    for part in split_by_length(table, inputs, chosen):
        parts.append(build_inputs(part, inputs, chosen, row))
        row += len(part)
    if len(parts) == 1:
        return dict(parts[0])
    return {name: [row for part in parts for row in part[name]] for name in parts[0]}


def from_arrays(arguments: Sequence[str], inputs: Inputs) -> Arrays:
    """`.npy` files, each for the only input or as `x=FILE`; a `.npz` with the inputs by name."""
    found: Arrays = {}
    for argument in arguments:
        if argument.endswith(".npz"):
            arrays = _load_arrays(argument)
            if "" in arrays:
                raise DataError("npy", argument, "is a single array, whatever its name", "write it with numpy.savez")
        else:
            spec, file = _split_target("npy", argument, inputs, is_file=True)
            loaded = _load_arrays(file)
            if "" not in loaded:
                raise DataError("npy", file, "holds arrays by name", "call it .npz, or write one with numpy.save")
            array = loaded[""]
            arrays = {spec.name: array[None] if array.ndim == len(spec.shape) - 1 else array}
        if alone := [name for name, array in arrays.items() if not array.ndim]:
            raise DataError("npy", argument, f"the array for {alone[0]!r} is a single number", "give [rows, ...]")
        found |= arrays
    return found


def _load_arrays(file: str) -> dict[str, np.ndarray]:
    """The arrays of a file by name; a single one has the name ""."""
    remedy = "write it with numpy.save or numpy.savez"
    try:
        with Path(file).open("rb") as opened:  # NumPy leaves a damaged archive open
            loaded = np.load(opened, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {"": loaded}
            arrays = {name: loaded[name] for name in loaded.files}
    # Damaged files may raise nearly any exception in NumPy's reader, or in that of archives.
    except (OSError, ValueError, KeyError, EOFError, SyntaxError, MemoryError, RuntimeError, *_DAMAGED) as error:
        problem = "is no array of NumPy's, or one of objects" if "pickle" in str(error) else summarize_error(error)
        raise DataError("npy", file, f"cannot be read: {problem}", remedy) from None
    if others := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
        raise DataError("npy", file, f"cannot be read: {others[0]!r} in it is no array", remedy)
    return arrays


def from_images(paths: Sequence[Path], white: float | None, inputs: Inputs) -> Arrays:
    """Images as rows of the only input, in its size and channels (1 or 3, before or after height and width).

    white: the value of a white pixel; None for 255 in integers and 1.0 in floats
    """
    spec = _require_single_input("image", str(paths[0]), inputs)
    pictures = [read_picture(path, str(path), spec, white) for path in paths]
    is_one_size = len({picture.shape for picture in pictures}) == 1
    return {spec.name: np.stack(pictures) if is_one_size else pictures}


def _split_target(field: str, argument: str, inputs: Inputs, *, is_file: bool = False) -> tuple[TensorDescription, str]:
    """The input of `x=...`, and the text after it."""
    specs = {spec.name: spec for spec in inputs}
    name, is_named, text = argument.partition("=")
    if is_named and name in specs:
        return specs[name], text
    if is_named and not (is_file and Path(argument).exists()):
        raise DataError(field, argument, f"the model has no input {name!r}", _list_inputs(inputs))
    return _require_single_input(field, argument, inputs), argument


def _require_single_input(field: str, argument: str, inputs: Inputs) -> TensorDescription:
    if len(inputs) != 1:
        remedy = f"write {inputs[0].name}=...; {_list_inputs(inputs)}"
        raise DataError(field, argument, "does not say for which input", remedy)
    return inputs[0]


def _list_inputs(inputs: Inputs) -> str:
    """`inputs: x: FP32 [any, 3], y: INT64 [any]`."""
    return "inputs: " + ", ".join(f"{spec.name}: {describe_tensor(spec)}" for spec in inputs)


def _parse_values(argument: str, text: str, spec: TensorDescription) -> list[Any]:
    if spec.datatype == "BYTES":
        return [text]
    parts = [part.strip() for part in text.split(",")]
    try:
        if spec.datatype == "BOOL":
            return [{"true": True, "1": True, "false": False, "0": False}[part.lower()] for part in parts]
        return [int(part) if is_integer(spec) else float(part) for part in parts]
    except (ValueError, KeyError):
        remedy = f"for example {spec.name}=1,0,1"
        raise DataError("input", argument, f"is not a list of {spec.datatype}", remedy) from None


def _reshape_rows(field: str, argument: str, rows: Any, spec: TensorDescription) -> ArrayLike:
    """Give values without a batch dimension, or without any shape, the input's shape."""
    inner = spec.shape[1:]
    try:
        array = np.array(rows, dtype=_choose_numpy_dtype(spec.datatype))
        if array.ndim < len(spec.shape) and any(isinstance(row, list) for row in array.flat):
            raise ValueError  # lists of different lengths, which NumPy would take as elements of an object array
    except ValueError:
        return _to_ragged_rows(field, argument, rows, spec)
    if array.ndim == len(spec.shape):
        return array
    size = math.prod(inner)
    if array.ndim == len(inner) and array.ndim > 1:
        return array[None]
    if array.ndim == 1 and size > 0 and array.size % size == 0:
        return array.reshape(-1, *inner)
    if array.ndim == 1 and len(inner) == 1:
        return array[None]
    problem = f"{array.size} values do not make rows of {describe_tensor(spec)}"
    raise DataError(field, argument, problem, "give whole rows, or nested lists")


def _choose_numpy_dtype(datatype: object) -> type[object] | None:
    """The dtype for parsing: object for texts, and for integers that NumPy would turn into floats."""
    return object if datatype in ("BYTES", "UINT64") else None


def _to_ragged_rows(field: str, argument: str, rows: Sequence[Any], spec: TensorDescription) -> list[np.ndarray]:
    """Rows of different lengths, each by itself. Raises DataError when the input does not allow them."""
    inner = spec.shape[1:]
    try:
        arrays = [np.array(row, dtype=_choose_numpy_dtype(spec.datatype)) for row in rows]
        is_open = -1 in inner and all(row.ndim == len(inner) for row in arrays)
    except ValueError:
        is_open = False
    if not is_open:
        raise DataError(field, argument, "has rows of different lengths", f"the input is {describe_tensor(spec)}")
    return arrays


def _parse_json(field: str, argument: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for numbers with thousands of digits
        raise DataError(field, argument, f"is not JSON: {error}", "for example [[1, 2], [3, 4]]") from None


def split_requests(arrays: Mapping[str, ArrayLike], max_rows: int) -> list[Arrays]:
    """Split into requests of at most `max_rows` rows, in order, each with rows of equal shapes.

    Raises DataError when the inputs have different numbers of rows.
    """
    counts = {name: len(values) for name, values in arrays.items()}
    if len(set(counts.values())) > 1:
        raise DataError("rows", counts, "inputs have different numbers of rows", "give each as many")
    if not any(counts.values()):
        raise DataError("rows", 0, "has no rows", "there is nothing to predict")
    count, starts = next(iter(counts.values())), [0]
    for row in range(1, count):
        if row - starts[-1] == max_rows or any(
            isinstance(values, list) and np.shape(values[row]) != np.shape(values[row - 1])
            for values in arrays.values()
        ):
            starts.append(row)
    return [
        {name: values[start:stop] for name, values in arrays.items()}
        for start, stop in zip(starts, [*starts[1:], count], strict=True)
    ]
