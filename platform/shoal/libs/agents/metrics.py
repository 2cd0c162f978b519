"""The metrics of a run of agents, from the counts of its gateway and its learner, and which of them are bad.

Called by the flow at each poll, and by what shows a run. Pure but for the memory of earlier counts, which gives rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shoal.extend.flows import Rate
from shoal.libs.agents.spec import AgentsSpec

LOGPROB_DIFFERENCE = 1e-3  # in float32; in bfloat16 there is no bound


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


def find_bad(spec: AgentsSpec, metrics: Mapping[str, float]) -> dict[str, str]:
    """The metrics that are above their bounds, and what helps."""
    is_exact = spec.text_algorithm.precision == "fp32"
    bounds = {
        "sessions/cut_fraction": (0.2, "many answers are cut off: raise max_tokens, or length"),
        "sessions/no_signal_fraction": (
            0.5,
            "most groups teach nothing, since all of their rewards are equal: give tasks that are sometimes solved",
        ),
        "sessions/sampling_overridden": (
            0,
            "agents ask for a sampling of their own, and get the run's: leave out temperature, top_p and penalties",
        ),
        "agents/token_lag_max": (spec.max_version_lag, "tokens are learnt that are older than max_version_lag"),
        "agents/logprob_diff_max": (
            LOGPROB_DIFFERENCE if is_exact else math.inf,
            "with the same weights, learner and sampler give tokens different probabilities: do not trust the run",
        ),
    }
    return {name: remedy for name, (bound, remedy) in bounds.items() if metrics.get(name, bound) > bound}
