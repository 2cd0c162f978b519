"""Which of several measured models is chosen: the cheapest whose quality has dropped by no more than is allowed.

Pure functions of numbers. Called by `search`, and by the plot for its front.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.errors import ConfigError

Cost = Literal["latency", "batch", "size", "flops"]
MIN_GAIN = 0.05  # that a smaller model must save: less may be the noise of a timing


@dataclass(frozen=True)
class MaxDrop:
    """The largest drop of a metric: `1%` of the teacher's value, or `0.01` in the metric's own unit."""

    value: float
    is_relative: bool

    @classmethod
    def parse(cls, text: str) -> MaxDrop:
        """Raises ConfigError."""
        matched = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,2})?)\s*(%?)", text.strip(), re.IGNORECASE)
        if matched is None:
            remedy = "write 1% of the model's own value, or 0.01 in the metric's unit"
            raise ConfigError("--max-drop", text, "is no drop", remedy)
        number, is_relative = float(matched[1]), bool(matched[2])
        if is_relative and number >= 100:
            raise ConfigError("--max-drop", text, "allows any model at all", "write less than 100%")
        return cls(number / 100 if is_relative else number, is_relative)

    def compute_limit(self, teacher: float, is_higher_better: bool) -> float:
        """The worst value that is allowed."""
        allowed = self.value * abs(teacher) if self.is_relative else self.value
        return teacher - allowed if is_higher_better else teacher + allowed


@dataclass(frozen=True)
class Measurement:
    """What one model gives and costs, after its last step.

    metrics:         of the evaluation, by name
    latency_s:       of one sample; batch_latency_s: of a batch; medians
    size_bytes:      of the registered file
    flops:           of one sample in float32; None: not countable
    """

    metrics: dict[str, float]
    latency_s: float
    batch_latency_s: float
    size_bytes: int
    flops: float | None

    def get_cost(self, kind: Cost) -> float:
        """The number that is to be small; infinite when unknown."""
        costs = {"latency": self.latency_s, "batch": self.batch_latency_s, "size": float(self.size_bytes)}
        return {**costs, "flops": math.inf if self.flops is None else self.flops}[kind]


def choose(measured: Sequence[Measurement], is_within: Sequence[bool], cost: Cost) -> int:
    """The index of the cheapest within the limit, of equal ones the fastest; 0, the teacher, if none saves MIN_GAIN."""
    most = measured[0].get_cost(cost) * (1 - MIN_GAIN)
    fitting = [
        index for index, each in enumerate(measured) if index and is_within[index] and each.get_cost(cost) <= most
    ]
    return min(fitting, key=lambda index: (measured[index].get_cost(cost), measured[index].latency_s), default=0)


def find_front(measured: Sequence[Measurement], metric: str, is_higher_better: bool, cost: Cost) -> list[int]:
    """The indices of those that no other beats in both quality and cost, cheapest first."""
    sign = 1.0 if is_higher_better else -1.0
    order = sorted(
        (index for index, each in enumerate(measured) if math.isfinite(each.metrics[metric])),
        key=lambda index: (measured[index].get_cost(cost), -sign * measured[index].metrics[metric]),
    )
    front: list[int] = []
    for index in order:
        if not front or sign * measured[index].metrics[metric] > sign * measured[front[-1]].metrics[metric]:
            front.append(index)
    return front
