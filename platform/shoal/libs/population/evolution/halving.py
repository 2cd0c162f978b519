"""Successive halving with early stopping, within a population (1810.05934).

At the ages of every · η^i rounds a member continues if its score is among the best 1/η of those seen so far at that
age. With `refill`, a new member with new weights takes the row of a stopped one; without, the row stays empty.

Not of the paper: its trials are paused at an age and promoted later, ours go on or end at once; members are trained in
step, so that those of one age are compared after all have arrived. A member whose score is no number is stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shoal.errors import ConfigError
from shoal.libs.population.evolution.evolution import Decisions, Evolution, Standing


class Halving(Evolution):
    """Raises ConfigError where it would stop no member."""

    def _set_up(self) -> None:
        spec, num_rounds = self.spec, self.num_rounds
        self.require_members(spec.reduction)
        if spec.every >= num_rounds:
            problem = f"no member would be compared within {num_rounds} rounds"
            raise ConfigError("evolution.every", spec.every, problem, f"use at most {num_rounds - 1}")
        num_rungs = math.ceil(math.log(num_rounds / spec.every, spec.reduction) - 1e-9)
        self.rungs = [spec.every * spec.reduction**index for index in range(num_rungs)]  # ages, in rounds
        self._scores: list[list[float]] = [[] for _ in self.rungs]
        self._births = [0] * self.num_members

    def _decide(self, standing: Standing) -> Decisions:
        ages = {member: standing.round_number - self._births[member] for member in standing.ranked}
        arrived = [(member, self.rungs.index(age)) for member, age in ages.items() if age in self.rungs]
        for member, rung in arrived:
            self._scores[rung].append(float(standing.scores[member]))
        rejected = []
        for member, rung in arrived:
            seen = sorted(self._scores[rung], reverse=True)
            if standing.scores[member] < seen[math.ceil(len(seen) / self.spec.reduction) - 1]:
                rejected.append(member)
        dropped = tuple(sorted([*standing.failed, *(() if standing.is_last else rejected)]))
        if not (self.spec.refill and self.num_rounds - standing.round_number >= self.spec.every):
            return Decisions(retired=standing.failed, stopped=dropped)
        for member in dropped:
            self._births[member] = standing.round_number
        changes = {member: self.space.sample(standing.rng) for member in dropped}
        return Decisions(retired=standing.failed, fresh=dropped, changes=changes)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scores": [list(each) for each in self._scores], "births": list(self._births)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._scores, self._births = [list(each) for each in state["scores"]], list(state["births"])
        self._scores += [[] for _ in self.rungs[len(self._scores) :]]  # a run that continues for more rounds has more
