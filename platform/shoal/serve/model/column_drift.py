"""Counts gaps in the columns of requests, and what a version's training has not seen: unknown words, numbers beyond.

Called by a loaded model, once for each batch, in the forward's thread. Pure functions of arrays. A column's range is
the version's own: its preprocessing step may have `ranges`, the least and greatest value of columns in training. Words
are refused by that step, which names their column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from shoal.registry.manifest import Signature
from shoal.serve.messages.infer_call import Arrays

Ranges = Mapping[str, tuple[float, float]]
ColumnCounts = Mapping[str, Mapping[str, int]]  # by column: values of each sort: gap, unknown, beyond
CountColumns = Callable[[int, ColumnCounts], None]  # takes a version, too


class ColumnDrift:
    """What one version counts. `is_empty`: no input is a column of a table."""

    def __init__(self, signature: Signature, ranges: Ranges) -> None:
        columns = [spec for spec in signature.inputs if spec.kind]
        self.is_empty = not columns
        self._texts = frozenset(spec.name for spec in columns if spec.kind == "word")
        self._numbers = [spec.name for spec in columns if spec.kind != "word"]
        bounds = [ranges.get(name, (-np.inf, np.inf)) for name in self._numbers]
        self._low, self._high = np.array(bounds, np.float64).reshape(-1, 2).T[..., np.newaxis]  # [columns, 1] each

    def count(self, inputs: Arrays) -> ColumnCounts:
        """Count a batch, without columns and sorts that have none."""
        found: dict[str, dict[str, int]] = {}
        for name in self._texts:
            if num_gaps := inputs[name].tolist().count(b""):
                found[name] = {"gap": num_gaps}
        if self._numbers:
            values = np.stack([inputs[name] for name in self._numbers])  # [columns, rows]
            gaps = np.isnan(values).sum(1)
            beyond = ((values < self._low) | (values > self._high)).sum(1)
            for at in np.flatnonzero(gaps + beyond).tolist():
                counts = {"gap": int(gaps[at]), "beyond": int(beyond[at])}
                found[self._numbers[at]] = {sort: count for sort, count in counts.items() if count}
        return found

    def count_rejection(self, field: str) -> ColumnCounts:
        """Count a request that was refused for this column."""
        return {field: {"unknown": 1}} if field in self._texts else {}
