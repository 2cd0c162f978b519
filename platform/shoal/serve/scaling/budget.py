"""The account of an endpoint's replica-hours in the present day or month, in UTC.

Called by the policy. Knows no clock: every call has the time. `min` and the floors of the rest of the period are set
aside first; replicas beyond them run only on what is left.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import accumulate

from shoal.serve.spec.scale import MINUTES_PER_WEEK, ScaleSpec


class Budget:
    """spent_s: replica-seconds of the period that began at `period_start_s`; both may be those of an earlier object."""

    def __init__(self, spec: ScaleSpec, period_start_s: float = 0.0, spent_s: float = 0.0) -> None:
        hours, self._period = spec.budget_hours
        self._budget_s = hours * 3600
        self._reserved = [0, *accumulate(each * 60 for each in spec.list_week_floors())]
        self.period_start_s, self.spent_s = period_start_s, spent_s

    def spend(self, replicas: int, since_s: float, now_s: float) -> None:
        """Charge replicas that ran from `since_s` to `now_s`."""
        start_s = self._find_start(now_s)
        if start_s != self.period_start_s:
            self.period_start_s, self.spent_s = start_s, 0.0
        self.spent_s += replicas * (now_s - max(since_s, start_s))

    def is_available(self, now_s: float) -> bool:
        """Whether replicas beyond `min` and the floors may run."""
        return self.spent_s + self._reserve_s(now_s) < self._budget_s

    def _find_start(self, now_s: float) -> float:
        now = datetime.fromtimestamp(now_s, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        return (now.replace(day=1) if self._period == "month" else now).timestamp()

    def _reserve_s(self, now_s: float) -> float:
        """What `min` and the floors take until the end of the period."""
        start = datetime.fromtimestamp(self.period_start_s, UTC)
        end = (start.replace(day=28) + timedelta(days=4)).replace(day=1) if self._period == "month" else (
            start + timedelta(days=1)
        )  # fmt: skip
        return self._reserve_until(end.timestamp()) - self._reserve_until(now_s)

    def _reserve_until(self, now_s: float) -> float:
        """Since the beginning of some week long ago."""
        minutes = now_s / 60 - 4 * 24 * 60  # 1970 began on a Thursday: four days before a Monday
        weeks, minute = divmod(minutes, MINUTES_PER_WEEK)
        before, after = self._reserved[int(minute)], self._reserved[int(minute) + 1]
        return weeks * self._reserved[-1] + before + (minute % 1) * (after - before)
