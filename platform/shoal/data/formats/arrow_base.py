"""The common part of column formats (pyarrow): the selected columns are read into memory, once per process.

Called by `parquet` and `arrow_files`, which read files into pyarrow's tables.
"""

from __future__ import annotations

from abc import abstractmethod
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shoal.data.formats.base import Fields, FileDataset, as_tensor, build_batch, parse_fields, require_path
from shoal.data.sampling.sampler import Indices
from shoal.errors import DataError, needs_extra
from shoal.store import fetch

with needs_extra("data"):
    import pyarrow as arrow


class ColumnDataset(FileDataset):
    """Columns of one file, or of all files of the format in a folder, by name.

    A mapping {name in the batch: column} gives batches that are dicts, a list gives tuples. Number columns are [B];
    lists of numbers of one length are [B, length]. For data larger than memory see docs/data.md.

    kind:     the name of the format
    suffixes: of its files in a folder
    """

    kind: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    def __init__(self, path: str | Path, fields: Fields) -> None:
        place = require_path(path)
        self.locations, self.as_dict = parse_fields(fields)
        files = [place]
        if place.is_dir():
            files = sorted((file for file in place.iterdir() if file.suffix in self.suffixes), key=attrgetter("name"))
            fetch(files)
        if not files:
            raise DataError("path", str(path), f"has no {' or '.join(f'*{suffix}' for suffix in self.suffixes)} in it")
        heads = [self._read_head_checked(file) for file in files]
        kinds = {column: _check_column(heads, files, column) for column in self.locations.values()}
        self._shapes = {name: f"{kinds[column]} of {column}" for name, column in self.locations.items()}
        super().__init__(files, sum(rows for rows, _ in heads))

    @staticmethod
    @abstractmethod
    def _read_head(path: Path) -> tuple[int, Any]:
        """The number of rows of a file, and its schema. Raises ArrowException or OSError."""

    @staticmethod
    @abstractmethod
    def _read_columns(path: Path, columns: list[str]) -> Any:
        """The table of these columns. Raises ArrowException or OSError."""

    def shapes(self) -> dict[str, str]:
        return self._shapes

    def batch(self, indices: Indices) -> Any:
        tensors = {name: as_tensor(values[indices], name) for name, values in self._files.items()}
        return build_batch(tensors, self.as_dict)

    def _open(self) -> dict[str, np.ndarray[Any, Any]]:
        columns = list(dict.fromkeys(self.locations.values()))
        tables = [self._read_columns_checked(file, columns) for file in self.paths]
        table = arrow.concat_tables(tables, promote_options="default")  # the types are equal: nullability may differ
        return {name: _read_values(table.column(column), column) for name, column in self.locations.items()}

    def _read_head_checked(self, path: Path) -> tuple[int, Any]:
        try:
            return self._read_head(path)
        except (arrow.ArrowException, OSError) as error:
            raise self._make_damage_error(path, error) from error

    def _read_columns_checked(self, path: Path, columns: list[str]) -> Any:
        try:
            return self._read_columns(path, columns)
        except (arrow.ArrowException, OSError) as error:
            raise self._make_damage_error(path, error) from error

    def _make_damage_error(self, path: Path, error: Exception) -> DataError:
        return DataError("path", str(path), f"cannot be read as {self.kind} ({error})", "is it whole?")


def _check_column(heads: list[tuple[int, Any]], files: list[Path], column: str) -> str:
    """The column's type, the same in every file. Raises DataError."""
    kinds = {}
    for (_, schema), file in zip(heads, files, strict=True):
        if column not in schema.names:
            raise DataError("fields", column, f"is no column of {file.name}", f"there are: {', '.join(schema.names)}")
        kinds[str(schema.field(column).type)] = schema.field(column).type
    if len(kinds) > 1:
        raise DataError("fields", column, f"is ragged: its type differs from file to file ({', '.join(kinds)})")
    ((name, kind),) = kinds.items()
    inner = kind.value_type if _is_list(kind) else kind
    if not (arrow.types.is_integer(inner) or arrow.types.is_floating(inner) or arrow.types.is_boolean(inner)):
        raise DataError("fields", column, f"holds {name}, which no tensor can", "leave it out, or turn it into numbers")
    return name


def _is_list(kind: Any) -> bool:
    types = arrow.types
    return any((types.is_list(kind), types.is_large_list(kind), types.is_fixed_size_list(kind)))


def _read_values(column: Any, name: str) -> np.ndarray[Any, Any]:
    """[N] or [N, length]. Raises DataError for missing values and for lists of unequal lengths."""
    if column.null_count:
        remedy = "fill them, or leave those rows out"
        raise DataError("fields", name, f"has {column.null_count} missing values of {len(column)}", remedy)
    array = column.combine_chunks()
    if not _is_list(column.type):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    lengths = np.diff(array.offsets.to_numpy()) if hasattr(array, "offsets") else np.array([column.type.list_size])
    if len(set(lengths.tolist())) > 1:
        problem = f"is ragged: its lists have from {lengths.min()} to {lengths.max()} values"
        raise DataError("fields", name, problem, "bring them to one length")
    inner = array.flatten()
    if inner.null_count:
        raise DataError("fields", name, f"has {inner.null_count} missing values", "fill them, or leave those rows out")
    return np.asarray(inner.to_numpy(zero_copy_only=False)).reshape(len(column), -1)
