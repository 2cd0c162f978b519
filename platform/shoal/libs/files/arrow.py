"""Column formats (pyarrow): Arrow files and streams, and Parquet. The selected columns are read into memory, once per
process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from shoal.errors import DataError, needs_extra
from shoal.libs.files.fields import FieldDataset, Fields, parse_fields, require_path
from shoal.store import fetch

with needs_extra("data"):
    import pyarrow as arrow
    from pyarrow import ipc, parquet

_MAGIC = b"ARROW1"  # begins an Arrow file, but not a stream


T = TypeVar("T")


class ColumnDataset(FieldDataset):
    """Columns of one file, or of all files of the format in a folder, by name.

    A mapping {name in the batch: column} gives batches that are dicts, a list gives tuples. Number columns are [B];
    lists of numbers of one length are [B, length]. For data larger than memory see docs/data.md.

    kind:     the name of the format
    suffixes: of its files in a folder
    """

    kind: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    def __init__(self, path: str | Path, fields: Fields) -> None:
        found = require_path(path)
        self.locations, self.as_dict = parse_fields(fields)
        files = [found]
        if found.is_dir():
            files = sorted((file for file in found.iterdir() if file.suffix in self.suffixes), key=attrgetter("name"))
            fetch(files)
        if not files:
            raise DataError("path", str(path), f"has no {' or '.join(f'*{suffix}' for suffix in self.suffixes)} in it")
        heads = [self._check_damage(self._read_head, file) for file in files]
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

    def _open(self) -> dict[str, np.ndarray[Any, Any]]:
        columns = list(dict.fromkeys(self.locations.values()))
        tables = [self._check_damage(self._read_columns, file, columns) for file in self.paths]
        table = arrow.concat_tables(tables, promote_options="default")  # the types are equal: nullability may differ
        return {name: _read_values(table.column(column), column) for name, column in self.locations.items()}

    def _check_damage(self, read: Callable[..., T], path: Path, *args: Any) -> T:
        """What `read` returns for a file. Raises DataError."""
        try:
            return read(path, *args)
        except (arrow.ArrowException, OSError) as error:
            raise DataError("path", str(path), f"cannot be read as {self.kind} ({error})", "is it whole?") from error


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


class Arrow(ColumnDataset):
    """Columns of one Arrow file or stream, or of all `*.arrow`, `*.feather` and `*.ipc` in a folder."""

    kind, suffixes = "Arrow", (".arrow", ".feather", ".ipc")

    @staticmethod
    def _read_head(path: Path) -> tuple[int, Any]:
        with _open_batches(path, []) as (_, batches):
            num_rows = sum(batch.num_rows for batch in batches)
        with _open_batches(path, None) as (schema, _):
            return num_rows, schema

    @staticmethod
    def _read_columns(path: Path, columns: list[str]) -> Any:
        with _open_batches(path, columns) as (schema, batches):
            return arrow.Table.from_batches(batches, schema).select(columns)


@contextmanager
def _open_batches(path: Path, columns: list[str] | None) -> Iterator[tuple[Any, Iterator[Any]]]:
    """The schema of these columns (None: of all), and the record batches, which have only these columns."""
    with arrow.OSFile(str(path)) as source:
        is_file = source.read(len(_MAGIC)) == _MAGIC
        source.seek(0)
        opened = ipc.open_file if is_file else ipc.open_stream
        options = ipc.IpcReadOptions()
        if columns is not None:
            with opened(source) as every:
                options = ipc.IpcReadOptions(included_fields=[every.schema.get_field_index(name) for name in columns])
            source.seek(0)
        with opened(source, options=options) as reader:
            indices = range(reader.num_record_batches) if is_file else None
            yield reader.schema, iter(reader) if indices is None else map(reader.get_batch, indices)


class Parquet(ColumnDataset):
    """Columns of one Parquet file, or of all `*.parquet` in a folder; pages that have checksums are checked."""

    kind, suffixes = "Parquet", (".parquet",)

    @staticmethod
    def _read_head(path: Path) -> tuple[int, Any]:
        with parquet.ParquetFile(path) as file:
            return file.metadata.num_rows, file.schema_arrow

    @staticmethod
    def _read_columns(path: Path, columns: list[str]) -> Any:
        return parquet.read_table(path, columns=columns, page_checksum_verification=True)
