"""The metrics of a run of agents, from the counts of its gateway and its learner.

Called by the flow at each poll. Pure but for the memory of earlier counts, which gives rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.extend.flows import Rate


class AgentsMetrics:
    """The metrics of one attempt of a run. Rates are those between the last two steps of the gateway."""

    def __init__(self) -> None:
        self._num_steps = -1
        self._rates = {"tokens/sampled": Rate(), "tokens/learned": Rate(), "train/step": Rate()}
        self._per_s = dict[str, float]()

    def compute(self, gateway: Mapping[str, Any], learner: Mapping[str, Any]) -> dict[str, float]:
        """Compute them from the newest stats of both, which may be old while a worker restarts."""
        counts = gateway["sessions"]
        metrics = {
            name if "/" in name else f"sessions/{name}": float(value)
            for name, value in counts.items()
            if isinstance(value, int | float)
        }
        metrics |= {**learner["metrics"], "train/step": float(learner["updates"])}
        if counts.get("steps", 0) != self._num_steps:
            self._num_steps = counts.get("steps", 0)
            self._per_s = {
                f"{name}_per_s": rate.update(gateway["counted_at"], metrics.get(name, 0.0))
                for name, rate in self._rates.items()
            }
        return metrics | self._per_s
