"""The sizes that a program admits in its variable dimensions: bounds, steps, and dimensions that must be equal.

Read from an exported program by `exported`. An endpoint checks each request of a version (`check`). A batch of
another number of rows than the program admits is computed in parts, or padded (`LimitedForward`). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shoal.errors import InferenceError
from shoal.extend.serve import Arrays, Forward

# torch traces with sizes of at least 2: a bound up to this is its own, or the user's, and it enforces neither.
MIN_TRACED = 2


class SizeRange(NamedTuple):
    """The bounds of a size; `most` is None without an upper one."""

    least: int = 0
    most: int | None = None

    def has(self, size: int) -> bool:
        """Whether the program admits this size."""
        return not self.is_below(size) and (self.most is None or size <= self.most)

    def is_below(self, size: int) -> bool:
        """Whether the size is too small."""
        return size < self.least and self.least > MIN_TRACED


class Dimension(NamedTuple):
    """Dimension `axis` of an input: its size is `factor` times the size `symbol`, plus `offset`.

    position: of the dimension in batch-first arrays (`BatchLayout`)
    """

    input: str
    axis: int
    position: int
    symbol: str
    factor: int = 1
    offset: int = 0

    def format_range(self, size: SizeRange) -> str:
        """`2 to 64`, or `at least 6 in steps of 2`."""
        least = self.factor * size.least + self.offset
        bounds = f"at least {least}" if size.most is None else f"{least} to {self.factor * size.most + self.offset}"
        return bounds if self.factor == 1 else f"{bounds} in steps of {self.factor}"


class SizeLimits:
    """The limits of one version.

    dimensions: the variable dimensions, except the rows
    sizes:      the bounds of their symbols
    rows:       the bounds of a batch
    """

    def __init__(
        self,
        dimensions: Sequence[Dimension] = (),
        sizes: Mapping[str, SizeRange] | None = None,
        rows: SizeRange = SizeRange(),  # noqa: B008 - immutable
    ) -> None:
        self._dimensions, self._sizes, self.rows = dimensions, sizes or {}, rows

    def check(self, inputs: Arrays) -> None:
        """Check a request's inputs, batch-first. Raises InferenceError (422)."""
        sizes: dict[str, tuple[int, Dimension]] = {}
        for dimension in self._dimensions:
            name, axis, position, symbol, factor, offset = dimension
            actual, bounds = inputs[name].shape[position], self._sizes[symbol]
            size, rest = divmod(actual - offset, factor)
            if rest or not bounds.has(size):
                expected = f"this version takes {dimension.format_range(bounds)} in dimension {axis}"
                raise InferenceError(422, f"input {name!r}: {expected}, got {actual}")
            other_size, other = sizes.setdefault(symbol, (size, dimension))
            if size != other_size:
                given = f"{inputs[other.input].shape[other.position]} in dimension {other.axis} of {other.input!r}"
                expected = f"expected {factor * other_size + offset} in dimension {axis}, as given by {given}"
                raise InferenceError(422, f"input {name!r}: {expected}, got {actual}")


class LimitedForward:
    """A forward that computes a larger batch than the version admits in parts, and pads a smaller one with its last
    row.

    batch_dims: the dimension of the batch in inputs and outputs; None for a tensor without it
    """

    def __init__(self, forward: Forward, limits: SizeLimits, batch_dims: Mapping[str, int | None]) -> None:
        self._forward, self.limits, self._batch_dims = forward, limits, batch_dims

    def __call__(self, inputs: Arrays) -> Arrays:
        limit = self.limits.rows
        if limit == SizeRange() or limit.has(num_rows := self._count_rows(inputs)):
            return self._forward(inputs)
        step = limit.most or num_rows
        parts = []
        for start in range(0, num_rows, step):
            rows = np.arange(start, min(start + step, num_rows))
            if not limit.is_below(len(rows)):
                parts.append(self._forward(self._select_rows(inputs, rows)))
                continue
            padded = self._select_rows(inputs, start + np.minimum(np.arange(limit.least), len(rows) - 1))
            parts.append(self._select_rows(self._forward(padded), np.arange(len(rows))))
        joined = {}
        for name, first in parts[0].items():
            dimension = self._batch_dims.get(name, 0)
            joined[name] = first if dimension is None else np.concatenate([part[name] for part in parts], dimension)
        return joined

    def _count_rows(self, inputs: Arrays) -> int:
        return next(
            int(array.shape[dimension])
            for name, array in inputs.items()
            if (dimension := self._batch_dims.get(name, 0)) is not None
        )

    def _select_rows(self, arrays: Arrays, rows: np.ndarray) -> Arrays:
        return {
            name: array if (dimension := self._batch_dims.get(name, 0)) is None else array.take(rows, dimension)
            for name, array in arrays.items()
        }
