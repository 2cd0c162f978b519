"""What the views of runs that train by steps share: the run's phase, its newest metrics, the finished share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepView:
    """One moment of a run with a known number of steps.

    metrics: the newest values of this attempt of the run
    setting: the details of the event that began it, with total_steps
    """

    run_id: str
    phase: str
    elapsed_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    setting: dict[str, Any] = field(default_factory=dict)

    def value(self, name: str) -> float:
        """The newest value of a metric; NaN when there is none."""
        return self.metrics.get(name, math.nan)

    @property
    def progress(self) -> float:
        """The finished share of the run, from 0 to 1; NaN when its end is unknown."""
        total, step = self.setting.get("total_steps"), self.value("train/step")
        return min(step / total, 1.0) if total else math.nan  # in this order: NaN before the first report
