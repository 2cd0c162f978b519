"""Sums over groups of non-negative numbers: draws an index in proportion to its number, for many draws at once.

Called by the replay. A tree of two levels: NumPy walks twenty levels of a binary one more slowly than it sums 16,000
groups, which is a million numbers. Legend: K indices, G groups.
"""

from __future__ import annotations

import numpy as np

GROUP_SIZE = 64


class SumTree:
    """Numbers 0 to `size` - 1, at first zero. Sums are computed anew from their numbers, so no rounding errors add up.

    numbers: their array, for instance a file's, of `padded_size(size)` float64; by default one in memory
    """

    def __init__(self, size: int, numbers: np.ndarray | None = None) -> None:
        numbers = np.zeros(padded_size(size)) if numbers is None else numbers
        self._groups = numbers.reshape(-1, GROUP_SIZE)  # [G, GROUP_SIZE], a view
        self._numbers, self._sums = numbers, self._groups.sum(1)
        self._num_used = len(np.trim_zeros(self._sums, "b"))  # groups that ever had a number: a ring fills for long

    @property
    def total(self) -> float:
        return float(self._sums[: self._num_used].sum())

    def get(self, indices: np.ndarray) -> np.ndarray:
        """The numbers at `indices`. [K]"""
        found: np.ndarray = self._numbers[indices]
        return found

    def set(self, indices: np.ndarray, values: np.ndarray | float) -> None:
        """Replace the numbers at `indices` [K]; of equal indices, the last one counts."""
        self._numbers[indices] = values
        groups = np.unique(indices // GROUP_SIZE)
        self._sums[groups] = self._groups[groups].sum(1)
        self._num_used = max(self._num_used, int(groups.max(initial=-1)) + 1)

    def find(self, fractions: np.ndarray) -> np.ndarray:
        """The index at each fraction, in [0, 1), of the running total; never one whose number is 0. [K]

        Raises ValueError if every number is 0.
        """
        ends = self._sums[: self._num_used].cumsum()  # [G]
        if not self._num_used or not ends[-1] > 0:
            raise ValueError("every number of the tree is 0: there is nothing to draw")
        targets = np.minimum(fractions * ends[-1], np.nextafter(ends[-1], 0))  # rounding may reach the end
        groups = ends.searchsorted(targets, side="right")
        targets -= ends[groups] - self._sums[groups]
        inner = self._groups[groups].cumsum(1)  # [K, GROUP_SIZE]
        targets = np.minimum(targets, np.nextafter(inner[:, -1], 0))
        found: np.ndarray = groups * GROUP_SIZE + (inner > targets[:, None]).argmax(1)
        return found


def padded_size(size: int) -> int:
    """The length of complete groups for `size` numbers."""
    return -(-size // GROUP_SIZE) * GROUP_SIZE
