"""The output folder of a batch prediction: it appears complete, with a row for each row of the input, or not at all.

Called by the shell of Ray Data. Two predictions into one folder never share a file: the first to end takes the name,
and the other's output remains next to it. Knows nothing of Ray or of models.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet

from shoal.errors import RunError
from shoal.store import open_source


def make_incoming_path(output: Path) -> Path:
    """A unique path next to `output`, for the incomplete output."""
    return output.with_name(f".incoming-{output.name}-{secrets.token_hex(4)}")


def has_rows(files: Sequence[Path]) -> bool:
    """Whether the files have any rows; reads no more than necessary."""
    return any(_has_csv_rows(file) if file.suffix == ".csv" else _count_parquet_rows(file) for file in files)


def count_rows(files: Sequence[Path]) -> int:
    """Count the rows of files already read, all CSV or all Parquet."""
    return sum(_count_csv_rows(file) if file.suffix == ".csv" else _count_parquet_rows(file) for file in files)


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


def _has_csv_rows(file: Path) -> bool:
    with open_source(file) as source, pyarrow.csv.open_csv(source) as reader:
        return any(batch.num_rows for batch in reader)


def _count_parquet_rows(file: Path) -> int:
    with open_source(file) as source:
        rows: int = pyarrow.parquet.read_metadata(source).num_rows
    return rows


def _count_csv_rows(file: Path) -> int:
    with open_source(file) as source, pyarrow.csv.open_csv(source) as reader:
        names = reader.schema.names
    # A type inferred from the beginning may not fit the rest; any value can be read as text.
    as_text = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()))
    with open_source(file) as source, pyarrow.csv.open_csv(source, convert_options=as_text) as reader:
        return sum(batch.num_rows for batch in reader)
