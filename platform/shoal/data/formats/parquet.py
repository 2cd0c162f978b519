"""Parquet files: `Parquet(path, ["x", "y"])`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.data.formats.arrow_base import ColumnDataset
from shoal.errors import needs_extra

with needs_extra("data"):
    from pyarrow import parquet


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
