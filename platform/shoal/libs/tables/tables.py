"""Tables of users, as the network takes them, and their checks. Imports no torch, so that clients may import it.

Legend: B tables, C context rows, Q queries, D columns, T targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.errors import DataError
from shoal.frame import find_names, require_equal_rows, to_floats

MAX_LABELLED = 20
MAX_CONTEXT = 64
MAX_COLUMNS = 10
MAX_TARGETS = 4
LARGEST_NUMBER = np.float64(1e100)  # squares of larger ones may overflow


def build_tables(X: Any, y: Any, X_query: Any) -> dict[str, np.ndarray]:
    """Build one table as a request has it: `x` [1, C, D], `y` [1, C, T] and `x_query` [1, Q, D], float64.

        client.infer("few-rows", build_tables(X, y, X_query))

    The columns of `X_query` are brought into the order of those of `X`, by name, when both are frames. Raises DataError
    as `to_floats`, and for a frame `X_query` with an `X` that has no names, or a `y` of pandas with another index.
    """
    names = find_names(X)
    if names is None and (asked := find_names(X_query)) is not None:
        remedy = "give X as a frame too, or X_query.to_numpy()"
        raise DataError("X_query", ", ".join(asked), "its columns have names, and those of X have none", remedy)
    require_equal_rows(X, y)
    targets = to_floats("y", y)
    targets = targets[:, None] if targets.ndim == 1 else targets
    arrays = {"x": to_floats("X", X), "y": targets, "x_query": to_floats("X_query", X_query, names)}
    return {name: values[None] for name, values in arrays.items()}


def check_tables(arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """x [B, C, D], y [B, C, T] and x_query [B, Q, D], unchanged.

    Raises DataError, naming table and row or column: for sizes beyond the MAX_ constants, for shapes that do not fit
    together, values that are infinite or too large to be squared, and targets without a label. One label is enough, for
    wide intervals.
    """
    x = arrays["x"]
    y = arrays["y"]
    x_query = arrays["x_query"]
    if not x.ndim == y.ndim == x_query.ndim == 3:
        raise DataError("table", [x.ndim, y.ndim, x_query.ndim], "has other dimensions", "give rows x columns")
    if x.shape[:2] != y.shape[:2] or x.shape[2] != x_query.shape[2] or len(x) != len(x_query):
        shapes = f"x {[*x.shape]}, y {[*y.shape]}, x_query {[*x_query.shape]}"
        raise DataError("table", shapes, "do not fit", "x and y share their rows, x and x_query their columns")
    for name, size, limit in (
        ("columns", x.shape[2], MAX_COLUMNS),
        ("targets", y.shape[2], MAX_TARGETS),
        ("rows", x.shape[1], MAX_CONTEXT),
    ):
        if size > limit:
            raise DataError(name, size, f"the network was trained for at most {limit}", f"choose {limit} {name}")
    for name, values in (("x", x), ("y", y), ("x_query", x_query)):
        if (is_large := np.abs(values) > LARGEST_NUMBER).any():
            table, row, column = np.argwhere(is_large)[0].tolist()
            cell = f"table {table}, row {row}, column {column}"
            if np.isinf(values[table, row, column]):
                raise DataError(name, cell, "is infinite", "give NaN if it is missing")
            raise DataError(name, cell, f"is beyond {LARGEST_NUMBER:g}", "give the column another unit")
    labels = (~np.isnan(y)).sum(1)  # [B, T]
    for problem, is_bad in (("has no label", labels < 1), ("has too many labels", labels > MAX_LABELLED)):
        if is_bad.any():
            table, target = np.argwhere(is_bad)[0].tolist()
            remedy = f"give 1 to {MAX_LABELLED} rows with a label (NaN: none)"
            raise DataError("y", f"table {table}, target {target}: {labels[table, target]} labels", problem, remedy)
    return arrays
