"""Ray Data's reading of tables from a bucket, through the copies of each host, and its writing of parts into one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import ray.data
from ray.data.block import Block, BlockAccessor, BlockMetadata
from ray.data.datasource import WriteResult

from shoal.serve.tables.bucket_output import BucketOutput, Part
from shoal.store import BucketPath, fetch

READ_ROWS = 65536  # at once


class BucketTables(ray.data.Datasource):
    """Files of a bucket, all CSV or all Parquet, each read by one task on any host.

    types: of CSV columns, instead of the inferred ones
    """

    def __init__(self, files: Sequence[BucketPath], types: Mapping[str, pa.DataType] | None) -> None:
        self._files, self._types = files, types

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ray.data.ReadTask]:
        return [
            ray.data.ReadTask(
                partial(_read_tables, file, self._types),
                BlockMetadata(None, file.size_bytes, None, input_files=(file.url,)),
            )
            for file in self._files
        ]


class PartSink(ray.data.Datasink[Part | None]):
    """Writes the parts of an output; `parts` has them afterwards."""

    def __init__(self, output: BucketOutput) -> None:
        self._output = output
        self.parts: list[Part] = []

    def write(self, blocks: Iterable[Block], ctx: Any) -> Part | None:
        tables = [BlockAccessor.for_block(block).to_arrow() for block in blocks]
        return self._output.write_part(ctx.task_idx, [table for table in tables if table.num_rows])

    def on_write_complete(self, write_result: WriteResult[Part | None]) -> None:
        self.parts = [part for part in write_result.write_returns if part is not None]


def _read_tables(file: BucketPath, types: Mapping[str, pa.DataType] | None) -> Iterator[pa.Table]:
    fetch([file])
    if file.suffix == ".csv":
        with pyarrow.csv.open_csv(file, convert_options=pyarrow.csv.ConvertOptions(column_types=types)) as reader:
            yield from (pa.Table.from_batches([batch]) for batch in reader)
        return
    with pyarrow.parquet.ParquetFile(file) as source:
        yield from (pa.Table.from_batches([batch]) for batch in source.iter_batches(READ_ROWS))
