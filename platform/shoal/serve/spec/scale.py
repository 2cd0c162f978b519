"""How an endpoint's number of replicas follows its load: bounds, floors by schedule, and a budget of replica-hours.

Written by users as `endpoint.scale`; `serve.scaling` decides by it. Owns the grammar of floors and budgets.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, field_validator, model_validator

from shoal.config import Spec

MAX_REPLICAS = 10_000
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MINUTES_PER_DAY, MINUTES_PER_WEEK = 24 * 60, 7 * 24 * 60
LONGEST_DAYS = {"day": 1, "month": 31}
_FLOOR = re.compile(r"(?:([a-z,-]+) +)?(\d\d):(\d\d)-(\d\d):(\d\d)(?: +(\S+))?")
_BUDGET = re.compile(r"(\d+(?:\.\d+)?)/(day|month)")
A_WEEK = datetime(2024, 1, 1, tzinfo=UTC)  # any: it starts on a Monday


@dataclass(frozen=True)
class Floor:
    """A daily span of local time with a least number of replicas; one that ends before it starts ends the next day."""

    days: frozenset[int]
    start_minute: int
    end_minute: int
    zone: ZoneInfo

    @classmethod
    def parse(cls, text: str) -> Floor:
        """`mon-fri 08:00-18:00 Europe/Zurich`; no days: every day, no zone: UTC. Raises ValueError."""
        parts = _FLOOR.fullmatch(text.strip())
        if parts is None:
            raise ValueError(f"{text!r} is not DAYS HH:MM-HH:MM ZONE, as in 'mon-fri 08:00-18:00 Europe/Zurich'")
        days, *clock, zone = parts.groups()
        hours = [int(each) for each in clock]
        start, end = hours[0] * 60 + hours[1], hours[2] * 60 + hours[3]
        if max(hours[1], hours[3]) > 59 or start >= MINUTES_PER_DAY or end > MINUTES_PER_DAY or start == end:
            raise ValueError(f"{text!r} has no span from 00:00 to 24:00")
        try:
            return cls(_parse_days(days or "mon-sun"), start, end, ZoneInfo(zone or "UTC"))
        except (ZoneInfoNotFoundError, ValueError, OSError):  # OSError: a folder of zones
            raise ValueError(f"{text!r} names no known days (mon-fri, sat,sun) or time zone (Europe/Zurich)") from None

    def contains(self, now: datetime) -> bool:
        local = now.astimezone(self.zone)
        day, minute = local.weekday(), local.hour * 60 + local.minute
        if self.start_minute < self.end_minute:
            return day in self.days and self.start_minute <= minute < self.end_minute
        return (day in self.days and minute >= self.start_minute) or (
            (day - 1) % 7 in self.days and minute < self.end_minute
        )


def _parse_days(text: str) -> frozenset[int]:
    days: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        start, end = DAYS.index(first), DAYS.index(last or first)
        days |= {(start + each) % 7 for each in range((end - start) % 7 + 1)}
    return frozenset(days)


class ScaleSpec(Spec):
    """The number of replicas follows the load.

    objective_s: 99 of 100 requests are to be answered within it; None: the shortest `deadline_s` of the models, or 0.5
    min, max:    the bounds; min 0 lets an idle endpoint have none
    idle_s:      with min 0: how long no request came before the last replica ends
    floors:      a least number of replicas at times, {"mon-fri 08:00-18:00 Europe/Zurich": 2}; without days every day,
                 without a zone UTC. Of several the highest counts
    budget:      replica-hours of a calendar day or month in UTC, "40/day", "900/month"; "": no limit. `min` and the
                 floors are always kept, so it must cover them
    """

    objective_s: float | None = Field(default=None, gt=0)
    min: int = Field(default=1, ge=0, le=MAX_REPLICAS)
    max: int = Field(ge=1, le=MAX_REPLICAS)
    idle_s: float = Field(default=300.0, gt=0)
    floors: dict[str, int] = Field(default_factory=dict)
    budget: str = ""

    @field_validator("floors")
    @classmethod
    def _spans(cls, floors: dict[str, int]) -> dict[str, int]:
        for text, replicas in floors.items():
            Floor.parse(text)
            if replicas < 1:
                raise ValueError(f"{text!r}: a floor is at least 1 replica, this is {replicas}")
        return floors

    @field_validator("budget")
    @classmethod
    def _hours_per_period(cls, budget: str) -> str:
        if budget and _BUDGET.fullmatch(budget) is None:
            raise ValueError("a budget is replica-hours of a day or month, such as 40/day or 900/month")
        return budget

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max = {self.max} is below min = {self.min}")
        if too_high := [text for text, replicas in self.floors.items() if replicas > self.max]:
            raise ValueError(f"floors: {too_high[0]!r} is above max = {self.max}")
        if useless := [text for text, replicas in self.floors.items() if replicas < self.min]:
            raise ValueError(f"floors: {useless[0]!r} is below min = {self.min}, which always holds: lower min")
        if self.budget:
            needed, (hours, period) = self._count_floor_hours(), self.budget_hours
            if hours < needed:
                problem = f"min and floors take up to {needed:g} replica-hours a {period}"
                raise ValueError(f"budget = {self.budget} is too small: {problem}")
        return self

    @property
    def budget_hours(self) -> tuple[float, str]:
        """Replica-hours, and "day" or "month"; infinity without a budget."""
        parts = _BUDGET.fullmatch(self.budget)
        return (math.inf, "day") if parts is None else (float(parts[1]), parts[2])

    def _count_floor_hours(self) -> float:
        """What `min` and the floors take of the longest period, at most."""
        per_minute = self.list_week_floors()
        by_day = [sum(per_minute[each : each + MINUTES_PER_DAY]) / 60 for each in range(0, MINUTES_PER_WEEK, 1440)]
        days = LONGEST_DAYS[self.budget_hours[1]]
        return max(sum(by_day[(first + day) % 7] for day in range(days)) for first in range(7))

    def list_week_floors(self) -> list[int]:
        """The floor of each minute of a week, which begins on Monday in UTC."""
        if not self.floors:
            return [self.min] * MINUTES_PER_WEEK
        spans = self.parse_floors()
        return [self.find_floor(A_WEEK + timedelta(minutes=each), spans) for each in range(MINUTES_PER_WEEK)]

    def parse_floors(self) -> list[tuple[Floor, int]]:
        return [(Floor.parse(text), replicas) for text, replicas in self.floors.items()]

    def find_floor(self, now: datetime, spans: list[tuple[Floor, int]]) -> int:
        """The least number of replicas at a time."""
        return max([self.min, *(replicas for floor, replicas in spans if floor.contains(now))])
