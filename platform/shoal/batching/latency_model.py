"""Predicts the duration of a forward from its rows; learned from every batch.

Owns one estimate, l(rows). The scheduler uses it for three things only: to refuse a request that cannot meet its
deadline, to cap a batch that would break a deadline if larger, and to share the machine between models. It never
decides when a batch starts. Knows no clock, no thread and no request.

Sizes fall into classes, four to an octave. A class retains the last `WINDOW` times of its batches within `FRESH_S` and
reports a high quantile of them, so its estimate is usually met. One slow batch does not move it; a slower model does
within a few batches. Between observed classes l is linear, below and above them it is flat: an untried size is assumed
cheap and measured at its first try.

l never falls with the rows. Where classes contradict each other, the cheaper one counts: a size that looks too cheap is
tried and corrects itself, while one that looks too dear is refused and never measured again. For the same reason a
class that is not *firm* (it has a single time, or was not seen while others were) bends to the firm ones, and its rows
cost at most their cost in smaller batches. Only the times are retained, so the effect of a slow moment expires with
them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from shoal.errors import ConfigError

Measured = Sequence[tuple[int, float]]  # rows and seconds of forwards

WINDOW = 50
QUANTILE = 0.8
CLASSES_PER_OCTAVE = 4
FRESH_S = 10.0
MIN_FIRM_TIMES = 2  # times
# Fast forwards are sampled: a window of them then covers more than a moment, and learning costs nothing.
OBSERVED_EVERY_S = 0.005
RENEWED_EVERY_S = 1.0  # at least, since classes age


class LatencyModel:
    """l(rows) in seconds, from `observe(rows, seconds, now_s)`. All zero before the first observation.

    Read from any thread; observed by one thread at a time, under the scheduler's lock.
    """

    def __init__(self) -> None:
        self._classes: dict[int, _SizeClass] = {}
        self._ascending: list[_SizeClass] = []
        self._renew_from_s = -math.inf
        # Their rows and their seconds, which never fall. Replaced, never changed: readers hold no lock.
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
        """Seconds that a forward over so many rows should take at most, four times out of five."""
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
        """The most rows expected to take no longer than `seconds`: 0 for none, infinity for any number."""
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
        """(rows, seconds) of every observed class, ascending, for simulations and status pages."""
        return list(zip(*self._curve, strict=True))


class _SizeClass:
    """The recent times of batches of about one size.

    rows:    its size on the curve: a high quantile of its times belongs to its larger batches
    seconds: the quantile, but never the largest of three or more: one slow batch is no evidence
    """

    __slots__ = ("_recent", "_sorted", "rows", "seconds", "seen_s")

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float, float]] = deque()
        self._sorted: list[float] = []
        self.rows = 0
        self.seconds = 0.0
        self.seen_s = -math.inf

    def add(self, rows: int, seconds: float, now_s: float) -> bool:
        """Add a time; returns whether the estimate changed."""
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
        """Whether the estimate rests on several recent times."""
        return len(self._sorted) >= MIN_FIRM_TIMES and self.seen_s >= fresh_from_s


def _fit_curve(ascending: list[_SizeClass], fresh_from_s: float) -> list[float]:
    """Seconds of each class: for a firm one the least from it upwards, for the others a value between those."""
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
    """The class of a batch: exact up to 8 rows, then four classes to an octave."""
    octave = max(rows - 1, 1).bit_length() - 1
    width = max(1, (1 << octave) // CLASSES_PER_OCTAVE)
    return octave * 2 * CLASSES_PER_OCTAVE + -(-rows // width)


class ForwardTime:
    """l(rows) through measured points: straight between them, flat below the first, its last slope above the last.

    It never falls with the rows: of contradicting points the cheaper one counts (see `latency_model`). Raises
    ConfigError for no points, or points that are not above zero.
    """

    def __init__(self, measured: Measured) -> None:
        points = dict(sorted(measured))
        if not points:
            raise ConfigError("measured", measured, "holds no (rows, seconds)", "measure at least one batch size")
        for rows, seconds in points.items():
            if rows < 1 or not 0 < seconds < math.inf:
                raise ConfigError("measured", (rows, seconds), "rows and seconds must be above zero")
        never_falling = list(accumulate(reversed(points.values()), min))[::-1]
        self._rows, self._seconds = list(points), never_falling

    def seconds(self, rows: int) -> float:
        """The duration of a forward over so many rows."""
        if len(self._rows) == 1 or rows <= self._rows[0]:
            return self._seconds[0]
        right = min(bisect_left(self._rows, rows), len(self._rows) - 1)
        left = right - 1
        slope = (self._seconds[right] - self._seconds[left]) / (self._rows[right] - self._rows[left])
        return self._seconds[left] + slope * (rows - self._rows[left])

    def capacity_per_s(self, max_batch_rows: int) -> float:
        """Rows a second when every forward has the best size."""
        return max(rows / self.seconds(rows) for rows in range(1, max_batch_rows + 1))

    def tabulate(self, max_rows: int) -> list[float]:
        """The duration of a forward over 1 to `max_rows` rows."""
        return [self.seconds(rows) for rows in range(1, max_rows + 1)]
