"""Fill in a CSV: the rows with a target are the context, and an endpoint predicts it for the others.

    shoal run few_rows                                                      # trains and registers few-rows@champion
    shoal run serve_apps/registered_model.py models=few-rows@champion       # serves it until Ctrl-C
    python serve_apps/few_rows_client.py table.csv price
    python serve_apps/few_rows_client.py table.csv price weight --impute --semi-supervised

All other columns must be numbers, or dates as 2026-03-01 or 2026-03-01T12:30, which become seconds. An empty cell of
them is an error, which names file and row, unless `--impute` gives it the column's mean. `--semi-supervised` lets the
context attend to the rows without a target too.
"""

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shoal.client import Client
from shoal.client.discovery import find_endpoint, token_for
from shoal.errors import DataError, ShoalError

MODEL = "few-rows"


class FilledTable(NamedTuple):
    """Numbers of a CSV; NaN where a cell is empty."""

    features: np.ndarray  # float64 [rows, columns]
    targets: np.ndarray  # float64 [rows, targets]
    lines: list[int]  # of the file, counted from 1

    def as_request(self, *, semi_supervised: bool) -> dict[str, np.ndarray]:
        """Rows without any target are queries, and with `semi_supervised` context too."""
        is_query = np.isnan(self.targets).all(1)
        context = np.ones_like(is_query) if semi_supervised else ~is_query
        arrays = {
            "x": self.features[context],
            "y": self.targets[context],
            "x_query": self.features[is_query],
        }
        return {name: values[None] for name, values in arrays.items()}


def read_table(path: Path, targets: Sequence[str], *, impute: bool = False) -> FilledTable:
    """Read a CSV with a line of names. Raises DataError, which names the file, and the row and column of the cell."""
    with path.open(newline="", encoding="utf-8-sig") as file:  # as spreadsheets write it
        reader = csv.reader(file)
        names = next(reader, [])
        for target in targets:
            if target not in names:
                raise DataError(str(path), target, "is none of its columns", f"it has {', '.join(names)}")
        rows, lines = [], []
        for cells in filter(None, reader):
            row = f"row {reader.line_num}"
            if len(cells) != len(names):
                raise DataError(str(path), row, f"has {len(cells)} cells for {len(names)} columns", "repair the row")
            found = [read_number(path, row, name, cell) for name, cell in zip(names, cells, strict=True)]
            gaps = [name for name, value in zip(names, found, strict=True) if math.isnan(value) and name not in targets]
            if gaps and not impute:
                raise DataError(str(path), row, f"has no value of {gaps[0]!r}", "fill it in, or give --impute")
            rows.append(found)
            lines.append(reader.line_num)
    table = np.array(rows, np.float64).reshape(len(rows), len(names))
    is_target = np.array([name in targets for name in names])
    order = [names.index(target) for target in targets]
    if not (known := ~np.isnan(table[:, order])).any(0).all():
        target = targets[int(np.argmin(known.any(0)))] if len(rows) else targets[0]
        raise DataError(str(path), target, "has no value in any row", "one is enough, for wide intervals")
    return FilledTable(table[:, ~is_target], table[:, order], lines)


def read_number(path: Path, row: str, name: str, cell: str) -> float:
    """NaN for an empty cell; seconds since 1970 for a date, of UTC where it has no zone."""
    try:
        value = float(cell) if cell.strip() else math.nan
    except ValueError:
        with suppress(ValueError):
            date = datetime.fromisoformat(cell.strip())
            return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
        raise DataError(str(path), row, f"{name!r} is {cell!r}, no number", "give categories numbers") from None
    if math.isinf(value) or (math.isnan(value) and cell.strip()):
        raise DataError(str(path), row, f"{name!r} is {cell!r}", "leave a missing cell empty")
    return value


def format_values(mean: float, low: float, high: float) -> tuple[str, ...]:
    """With six digits, or as many as tell the ends of the interval apart."""
    size = max(abs(low), abs(high)) / (high - low) if high > low else 1.0
    digits = max(6, 3 + math.ceil(math.log10(size)))
    return tuple(f"{value:.{digits}g}" for value in (mean, low, high))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--impute", action="store_true")
    parser.add_argument("--semi-supervised", action="store_true")
    chosen = parser.parse_args()
    try:
        table = read_table(chosen.path, chosen.targets, impute=chosen.impute)
        unknown = [line for line, row in zip(table.lines, table.targets, strict=True) if np.isnan(row).all()]
        if not unknown:
            raise DataError(
                str(chosen.path), chosen.targets[0], "has a value in each row", "leave it empty to ask for it"
            )
        found = find_endpoint()
        with Client(found.url, token=token_for(found.url)) as client:
            answer = client.infer(MODEL, table.as_request(semi_supervised=chosen.semi_supervised))
    except (OSError, ShoalError) as error:
        sys.exit(f"error: {error}")
    except (UnicodeError, csv.Error) as error:
        sys.exit(f"error: {chosen.path} is no CSV file in UTF-8: {error}")
    for line, means, quantiles in zip(unknown, answer["mean"][0], answer["quantiles"][0], strict=True):
        for target, mean, levels in zip(chosen.targets, means, quantiles, strict=True):
            mean, low, high = format_values(mean, levels[0], levels[-1])
            print(f"row {line}: {target} {mean}, 90% between {low} and {high}")


if __name__ == "__main__":
    main()
