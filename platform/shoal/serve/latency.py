"""How long a forward takes, by the number of its rows: learned from every batch, asked before every promise.

Owns one estimate, l(rows). Called by the schedule, which uses it for three things only: to refuse a request that cannot
make its deadline, to cap a batch whose deadline a larger one would break, and to share the machine between models. It
never decides when a batch starts. Knows no clock, no thread and no request.

Sizes are gathered in classes, four to an octave. A class keeps the last `WINDOW` times of batches of about its size and
stands for a high quantile of them, so that a promise made by it is usually kept; one slow batch does not move it,
a model that became slower does within a few batches. Between the classes that were seen l is a straight line, below
and above them it is flat: what was never tried is hoped to be cheap, and is known after the first try. l never falls
with the rows: where classes contradict each other, the one that was seen last is right.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque

WINDOW = 50
QUANTILE = 0.8
CLASSES_PER_OCTAVE = 4


class LatencyModel:
    """l(rows) in seconds, from `observe(rows, seconds)`. All zero before the first observation.

    Read from any thread; observed by one at a time (the schedule's lock sees to that).
    """

    def __init__(self) -> None:
        self._classes: dict[int, _SizeClass] = {}
        self._keys: list[int] = []  # of the classes that were seen, ascending
        # Their rows, and their seconds, which never fall. Replaced, never changed: readers hold no lock.
        self._curve: tuple[list[int], list[float]] = ([], [])

    def observe(self, rows: int, seconds: float) -> None:
        """A forward over `rows` rows took `seconds`."""
        key = size_class(rows)
        all_rows, all_seconds = self._curve[0].copy(), self._curve[1].copy()
        place = bisect_left(self._keys, key)
        if key not in self._classes:
            self._classes[key] = _SizeClass()
            self._keys.insert(place, key)
            all_rows.insert(place, rows)
            all_seconds.insert(place, seconds)
        known = self._classes[key]
        known.add(rows, seconds)
        all_rows[place] = known.most_rows
        all_seconds[place] = estimate = known.high_seconds
        for below in range(place - 1, -1, -1):
            if all_seconds[below] <= estimate:
                break
            all_seconds[below] = estimate
        for above in range(place + 1, len(all_seconds)):
            if all_seconds[above] >= estimate:
                break
            all_seconds[above] = estimate
        self._curve = all_rows, all_seconds

    def seconds(self, rows: float) -> float:
        """What a forward over so many rows is expected to take at most, four times out of five."""
        all_rows, all_seconds = self._curve
        if not all_rows:
            return 0.0
        above = bisect_left(all_rows, rows)
        if above == 0:
            return all_seconds[0]
        if above == len(all_rows):
            return all_seconds[-1]
        left, right = all_rows[above - 1], all_rows[above]
        part = (rows - left) / (right - left)
        return all_seconds[above - 1] + part * (all_seconds[above] - all_seconds[above - 1])

    def rows_within(self, seconds: float) -> float:
        """The most rows that are expected to take no longer than `seconds`: 0 for none, infinity for any number."""
        all_rows, all_seconds = self._curve
        above = bisect_right(all_seconds, seconds)
        if above == len(all_seconds):
            return math.inf
        if above == 0:
            return 0
        low, high = all_seconds[above - 1], all_seconds[above]
        left, right = all_rows[above - 1], all_rows[above]
        return int(left + (right - left) * (seconds - low) / (high - low))

    def measured(self) -> list[tuple[int, float]]:
        """(rows, seconds) of every class that was seen, ascending: what a simulation or a page shows."""
        return list(zip(*self._curve, strict=True))


class _SizeClass:
    """The last times of batches of about one size."""

    __slots__ = ("_recent", "_sorted")

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque()
        self._sorted: list[float] = []

    def add(self, rows: int, seconds: float) -> None:
        self._recent.append((rows, seconds))
        insort(self._sorted, seconds)
        if len(self._recent) > WINDOW:
            _, oldest = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]

    @property
    def most_rows(self) -> int:
        """Where the class stands: a high quantile of its times belongs to its larger batches."""
        return max([rows for rows, _ in self._recent])

    @property
    def high_seconds(self) -> float:
        """The quantile, but never the largest of three or more: one slow batch convinces nobody."""
        count = len(self._sorted)
        return self._sorted[max(0, min(int(QUANTILE * count), count - 2))]


def size_class(rows: int) -> int:
    """Which class a batch belongs to: exact up to 8 rows, then four classes to an octave."""
    octave = max(rows - 1, 1).bit_length() - 1
    width = max(1, (1 << octave) // CLASSES_PER_OCTAVE)
    return octave * 2 * CLASSES_PER_OCTAVE + -(-rows // width)
