"""The account of an endpoint's replica-hours in the present day or month, in UTC.

Called by the policy. Knows no clock: every call has the time. `min` and the floors of the rest of the period are set
aside first; replicas beyond them run only on what is left.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from itertools import accumulate

from shoal.serve.spec.scale import MINUTES_PER_WEEK, ScaleSpec


class Budget:
    """spent_s: replica-seconds, charged until `charged_s`; both may be those of an earlier object of this `period`."""

    def __init__(self, spec: ScaleSpec, charged_s: float | None = None, spent_s: float = 0.0) -> None:
        hours, self.period = spec.budget_hours
        self._budget_s = hours * 3600
        self._floors = spec.list_week_floors()
        self._reserved = [0, *accumulate(each * 60 for each in self._floors)]
        self.charged_s, self.spent_s = charged_s, spent_s

    def spend(self, replicas: int, now_s: float) -> None:
        """Charge replicas that ran until now, since the last call."""
        start_s, since_s = self._find_start(now_s), now_s if self.charged_s is None else self.charged_s
        if since_s < start_s:
            since_s, self.spent_s = start_s, 0.0
        self.spent_s += replicas * (now_s - since_s)
        self.charged_s = now_s

    def is_available(self, now_s: float) -> bool:
        """Whether replicas beyond `min` and the floors may run."""
        return self.spent_s + self._reserve_s(now_s) < self._budget_s

    def find_rejection_end(self, now_s: float) -> float:
        """Until when it allows no replica: its next period, or the next floor; 0 when it allows one now."""
        minute = math.floor(_count_minutes(now_s))
        weeks_floors = (self._floors[(minute + each) % MINUTES_PER_WEEK] for each in range(MINUTES_PER_WEEK))
        to_floor = next((number for number, floor in enumerate(weeks_floors) if floor), None)
        if to_floor == 0 or self.is_available(now_s):
            return 0.0
        end_s = self._find_end(now_s)
        return end_s if to_floor is None else min(end_s, math.floor(now_s / 60) * 60.0 + to_floor * 60)

    def _find_start(self, now_s: float) -> float:
        now = datetime.fromtimestamp(now_s, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        return (now.replace(day=1) if self.period == "month" else now).timestamp()

    def _reserve_s(self, now_s: float) -> float:
        """What `min` and the floors take until the end of the period."""
        return self._reserve_until(self._find_end(now_s)) - self._reserve_until(now_s)

    def _find_end(self, now_s: float) -> float:
        start = datetime.fromtimestamp(self._find_start(now_s), UTC)
        end = (start.replace(day=28) + timedelta(days=4)).replace(day=1) if self.period == "month" else (
            start + timedelta(days=1)
        )  # fmt: skip
        return end.timestamp()

    def _reserve_until(self, now_s: float) -> float:
        """Since the beginning of some week long ago."""
        weeks, minute = divmod(_count_minutes(now_s), MINUTES_PER_WEEK)
        before, after = self._reserved[int(minute)], self._reserved[int(minute) + 1]
        return weeks * self._reserved[-1] + before + (minute % 1) * (after - before)


def _count_minutes(now_s: float) -> float:
    """Since the beginning of some week long ago."""
    return now_s / 60 - 4 * 24 * 60  # 1970 began on a Thursday: four days before a Monday
