"""Arrow's own files (also called Feather, or IPC) and streams, as other libraries write them: `Arrow(path, ["x"])`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.data.formats.arrow_base import ColumnDataset
from shoal.errors import needs_extra

with needs_extra("data"):
    import pyarrow as arrow
    from pyarrow import ipc

_MAGIC = b"ARROW1"  # begins a file, but not a stream


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
            with opened(source) as whole:
                options = ipc.IpcReadOptions(included_fields=[whole.schema.get_field_index(name) for name in columns])
            source.seek(0)
        with opened(source, options=options) as reader:
            indices = range(reader.num_record_batches) if is_file else None
            yield reader.schema, iter(reader) if indices is None else map(reader.get_batch, indices)
