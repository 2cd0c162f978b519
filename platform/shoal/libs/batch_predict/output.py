"""The output of a batch prediction: it appears complete, with a row for each row of the input, or not at all.

Two predictions into one folder never share a file: the first to end takes the name, and the other's output remains next
to it. In a bucket, the parts lie apart until all are there:

    PREFIX/_incoming-TOKEN/part-000000.parquet   written by the workers
    PREFIX/_manifest.json                        the parts, with rows and bytes; of several predictions one creates it
    PREFIX/part-000000.parquet                   copied by the bucket itself
    PREFIX/_SUCCESS                              the last object: all parts are there

Readers of folders of Parquet (Arrow, Spark) ignore names that begin with `_`. Called by the flow and by the shell of
Ray Data. Knows nothing of Ray or of models.
"""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from shoal.errors import DataError, RunError, StoreError
from shoal.open_inference.tables import START_BYTES, csv_options
from shoal.store import KeyTaken, open_source, open_store

MAX_PARALLEL_COPIES = 16
MANIFEST, LAST = "_manifest.json", "_SUCCESS"
_INCOMING = "_incoming-"


def make_incoming_path(output: Path) -> Path:
    """A unique path next to `output`, for the incomplete output."""
    return output.with_name(f".incoming-{output.name}-{secrets.token_hex(4)}")


def read_csv_options(file: Path) -> dict[str, Any]:
    with open_source(file) as source:
        return csv_options(source.read(START_BYTES))


@contextmanager
def open_lines(file: Path) -> Iterator[pa.RecordBatchReader]:
    """The rows of a file of CSV, whose cells are texts, or of JSON lines, in batches."""
    options = read_csv_options(file) if file.suffix == ".csv" else {}
    read = pyarrow.csv.open_csv if options else pyarrow.json.open_json
    with open_source(file) as source, read(source, **options) as reader:
        yield reader


def _count_batches(file: Path) -> Iterator[int]:
    """The rows of each batch of a file, which are read one by one; of Parquet all of them at once."""
    if file.suffix == ".parquet":
        with open_source(file) as source:
            yield pyarrow.parquet.read_metadata(source).num_rows
    else:
        with open_lines(file) as reader:
            yield from (batch.num_rows for batch in reader)


def has_rows(files: Sequence[Path]) -> bool:
    """Whether the files have any rows; reads no more than necessary."""
    return any(any(_count_batches(file)) for file in files)


def count_rows(files: Sequence[Path]) -> int:
    """Count the rows of files already read."""
    return sum(sum(_count_batches(file)) for file in files)


def verify_row_count(incoming: Path, files: Sequence[Path]) -> int:
    """Count the rows written to `incoming`. Raises RunError unless `files` have as many."""
    written = count_rows([*incoming.glob("*.parquet")])
    require_all_rows(written, files)
    return written


def require_all_rows(written: int, files: Sequence[Path]) -> None:
    """Raises RunError unless as many rows were written as `files` have."""
    if written != (read := count_rows(files)):
        raise RunError(
            f"{written} rows were written for {read} of the input: the input may have changed: predict again"
        )


def publish_output(incoming: Path, output: Path) -> None:
    """Rename the complete output. Raises RunError, and retains it, when the name is taken."""
    try:
        incoming.rename(output)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"{output} cannot be made ({reason}): all rows are in {incoming}, rename that folder") from error


class Part(NamedTuple):
    """A Parquet file of the output."""

    name: str
    rows: int
    size_bytes: int


class BucketOutput:
    """One prediction's output below `url`. The same object, pickled, serves every worker."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.incoming = f"{_INCOMING}{secrets.token_hex(4)}"

    def require_new(self) -> None:
        """Raises DataError when there is an output, or a part of one, or when the bucket cannot be used."""
        try:
            names = [entry.key for entry in open_store(self.url).list_entries() if not entry.key.startswith(_INCOMING)]
        except StoreError as error:
            raise DataError("output", self.url, f"cannot be written: {error}") from error
        if names:
            problem = "exists already" if LAST in names or MANIFEST not in names else "is there in part"
            raise DataError("output", self.url, problem, "name a prefix that does not, or remove it")

    def write_part(self, number: int, tables: Sequence[pa.Table]) -> Part | None:
        """Upload rows as the part of this number, again if it was interrupted; None without rows. Raises StoreError."""
        table = pa.concat_tables(tables, promote_options="default") if tables else None
        if table is None or not table.num_rows:
            return None
        name = f"part-{number:06d}.parquet"
        with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
            pyarrow.parquet.write_table(table, file.name)
            size_bytes = Path(file.name).stat().st_size
            open_store(self.url).write(f"{self.incoming}/{name}", Path(file.name))
        return Part(name, table.num_rows, size_bytes)

    def publish(self, parts: Sequence[Part]) -> None:
        """Give the parts their names. Raises RunError, after which all are still in `incoming`."""
        store, rows = open_store(self.url), sum(part.rows for part in parts)

        def copy(part: Part) -> None:
            store.copy(f"{self.incoming}/{part.name}", part.name)

        try:
            store.create(MANIFEST, json.dumps({"rows": rows, "parts": [part._asdict() for part in parts]}).encode())
            with ThreadPoolExecutor(MAX_PARALLEL_COPIES) as pool:
                list(pool.map(copy, parts))
            store.write(LAST, b"")
        except OSError as error:
            reason = "another prediction has written it" if isinstance(error, KeyTaken) else error
            at = f"{self.url}/{self.incoming}"
            raise RunError(
                f"{self.url} cannot be made ({reason}): all rows are in {at}, copy them from there"
            ) from error
        self.discard()

    def discard(self) -> None:
        """Remove the incomplete output, as far as the bucket can be reached."""
        with suppress(OSError):
            store = open_store(self.url)
            store.delete([entry.key for entry in store.list_entries(self.incoming)])
