"""The folder that a batch prediction writes: it appears whole, with a row for each row of the input, or not at all.

Called by the shell of Ray Data. Two predictions into one folder never share a file: the first to end has the name, and
what the other wrote is kept beside it. Knows nothing of Ray or of models.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet

from shoal.errors import RunError


def make_incoming_path(output: Path) -> Path:
    """Where to write what is to become `output`: beside it, by a name that nobody else has."""
    return output.with_name(f".incoming-{output.name}-{secrets.token_hex(4)}")


def has_rows(files: Sequence[Path]) -> bool:
    """Whether there is anything in them; looks no further than it has to."""
    return any(_has_csv_rows(file) if file.suffix == ".csv" else _count_parquet_rows(file) for file in files)


def count_rows(files: Sequence[Path]) -> int:
    """The rows of files that have been read before, all CSV or all Parquet."""
    return sum(_count_csv_rows(file) if file.suffix == ".csv" else _count_parquet_rows(file) for file in files)


def verify_row_count(incoming: Path, files: Sequence[Path]) -> int:
    """How many rows were written to `incoming`. Raises RunError unless that is how many `files` have."""
    written, read = count_rows([*incoming.glob("*.parquet")]), count_rows(files)
    if written != read:
        raise RunError(f"{written} rows were written for {read} of the input: did it change meanwhile? predict again")
    return written


def publish_output(incoming: Path, output: Path) -> None:
    """Give what is complete its name. Raises RunError, and keeps it, when it cannot have that name."""
    try:
        incoming.rename(output)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"{output} cannot be made ({reason}): all rows are in {incoming}, rename that folder") from error


def _has_csv_rows(file: Path) -> bool:
    with pyarrow.csv.open_csv(file) as reader:
        return any(batch.num_rows for batch in reader)


def _count_parquet_rows(file: Path) -> int:
    rows: int = pyarrow.parquet.read_metadata(file).num_rows
    return rows


def _count_csv_rows(file: Path) -> int:
    with pyarrow.csv.open_csv(file) as reader:
        names = reader.schema.names
    # What its beginning looks like may be wrong of what follows; as text anything can be read.
    as_text = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()))
    with pyarrow.csv.open_csv(file, convert_options=as_text) as reader:
        return sum(batch.num_rows for batch in reader)
