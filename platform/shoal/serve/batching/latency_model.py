"""How long a forward takes, by the number of its rows: learned from every batch, asked before every promise.

Owns one estimate, l(rows). Called by the schedule, which uses it for three things only: to refuse a request that cannot
make its deadline, to cap a batch whose deadline a larger one would break, and to share the machine between models. It
never decides when a batch starts. Knows no clock, no thread and no request.

Sizes are gathered in classes, four to an octave. A class keeps the last `WINDOW` times of batches of about its size, of
the last `FRESH_S`, and stands for a high quantile of them, so that a promise made by it is usually kept; one slow batch
does not move it, a model that became slower does within a few batches. Between the classes that were seen l is a
straight line, below and above them it is flat: what was never tried is hoped to be cheap, and is known after the first
try.

l never falls with the rows. Where classes contradict each other, the cheaper is right: what looks too cheap is tried,
and so corrects itself, while what looks too dear is refused, and nobody learns that it is not. For the same reason a
class that is not *firm*, because it has a single time or was not seen while others were, bends to those that are, and
its rows cost at most what they cost in smaller batches. Nothing but the times themselves is kept: whatever a slow
moment does to the curve goes with it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque

WINDOW = 50
QUANTILE = 0.8
CLASSES_PER_OCTAVE = 4
FRESH_S = 10.0
MIN_FIRM_TIMES = 2  # times
# Who learns samples fast forwards: a window of them then covers more than a moment, and learning costs nothing.
OBSERVED_EVERY_S = 0.005
RENEWED_EVERY_S = 1.0  # at least, since classes age


class LatencyModel:
    """l(rows) in seconds, from `observe(rows, seconds, now_s)`. All zero before the first observation.

    Read from any thread; observed by one at a time (the schedule's lock sees to that).
    """

    def __init__(self) -> None:
        self._classes: dict[int, _SizeClass] = {}
        self._ascending: list[_SizeClass] = []
        self._renew_from_s = -math.inf
        # Their rows, and their seconds, which never fall. Replaced, never changed: readers hold no lock.
        self._curve: tuple[list[int], list[float]] = ([], [])

    def observe(self, rows: int, seconds: float, now_s: float) -> None:
        """A forward over `rows` rows took `seconds`, and ended at `now_s`."""
        key = size_class(rows)
        known = self._classes.get(key)
        if known is None:
            known = self._classes[key] = _SizeClass()
            self._ascending = [self._classes[each] for each in sorted(self._classes)]
        if known.add(rows, seconds, now_s) or now_s >= self._renew_from_s:
            self._renew_from_s = now_s + RENEWED_EVERY_S
            self._curve = [each.rows for each in self._ascending], _fit_curve(self._ascending, now_s - FRESH_S)

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

    def list_points(self) -> list[tuple[int, float]]:
        """(rows, seconds) of every class that was seen, ascending: what a simulation or a page shows."""
        return list(zip(*self._curve, strict=True))


class _SizeClass:
    """The last times of batches of about one size.

    rows:    where the class stands: a high quantile of its times belongs to its larger batches
    seconds: the quantile, but never the largest of three or more: one slow batch convinces nobody
    """

    __slots__ = ("_recent", "_sorted", "rows", "seconds", "seen_s")

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float, float]] = deque()
        self._sorted: list[float] = []
        self.rows, self.seconds, self.seen_s = 0, 0.0, -math.inf

    def add(self, rows: int, seconds: float, now_s: float) -> bool:
        """Whether what it stands for has changed."""
        recent, ascending = self._recent, self._sorted
        before = self.rows, self.seconds, len(ascending)
        recent.append((rows, seconds, now_s))
        insort(ascending, seconds)
        while len(recent) > WINDOW or recent[0][2] < now_s - FRESH_S:
            _, oldest, _ = recent.popleft()
            del ascending[bisect_left(ascending, oldest)]
        self.rows = max([rows for rows, _, _ in recent])
        count = len(ascending)
        self.seconds = ascending[max(0, min(int(QUANTILE * count), count - 2))]
        self.seen_s = now_s
        return before != (self.rows, self.seconds, count)

    def is_firm(self, fresh_from_s: float) -> bool:
        """Whether what it stands for is known well, and lately."""
        return len(self._sorted) >= MIN_FIRM_TIMES and self.seen_s >= fresh_from_s


def _fit_curve(ascending: list[_SizeClass], fresh_from_s: float) -> list[float]:
    """Seconds of each class: of the firm ones the least from it upwards, and of the others what fits between those."""
    firm = [known.is_firm(fresh_from_s) for known in ascending]
    seconds: list[float] = []
    least_firm = least = math.inf
    for known, is_firm in zip(reversed(ascending), reversed(firm), strict=True):
        least = min(least, known.seconds)
        if is_firm:
            least_firm = min(least_firm, known.seconds)
        seconds.append(least_firm if is_firm else least)
    seconds.reverse()
    floor, row_s = 0.0, math.inf
    for place, known in enumerate(ascending):
        if not firm[place]:
            seconds[place] = min(seconds[place], row_s * known.rows)
        floor = seconds[place] = max(floor, seconds[place])
        row_s = min(row_s, floor / known.rows)
    return seconds


def size_class(rows: int) -> int:
    """Which class a batch belongs to: exact up to 8 rows, then four classes to an octave."""
    octave = max(rows - 1, 1).bit_length() - 1
    width = max(1, (1 << octave) // CLASSES_PER_OCTAVE)
    return octave * 2 * CLASSES_PER_OCTAVE + -(-rows // width)
