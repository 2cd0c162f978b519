"""Population based bandits: PBT whose explore step asks a Gaussian process (2002.02518).

Truncation selection is that of `pbt`; `bandit` holds the process. Until it has observations, losers perturb what they
copied. Not of the paper: see `bandit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.libs.population.evolution.bandit import Bandit
from shoal.libs.population.evolution.evolution import Decisions, Standing
from shoal.libs.population.evolution.pbt import PBT
from shoal.libs.population.evolution.spec import EvolutionSpec
from shoal.search.space import SearchSpace, Values


class PB2(PBT):
    """Raises ConfigError for fewer than 2 members."""

    box_width: float | None = None  # see `Bandit.propose`

    def __init__(
        self, spec: EvolutionSpec, space: SearchSpace, num_members: int, *, num_rounds: int | None = None, seed: int = 0
    ) -> None:
        super().__init__(spec, space, num_members, num_rounds=num_rounds, seed=seed)
        self.bandit = Bandit(space)
        # The score from which each member's present stretch of training began; None: it began within a stretch.
        self._before: list[float | None] = [None] * num_members
        self._time = 0  # decisions so far

    def _decide(self, standing: Standing) -> Decisions:
        is_due = self._is_due(standing)
        if is_due:
            self._observe(standing)
        decisions = super()._decide(standing)
        if is_due:
            self._before = [float(score) if score == score else None for score in standing.scores]
        for loser, winner in decisions.copies:
            self._before[loser] = float(standing.scores[winner]) if is_due else None
        return decisions

    def _observe(self, standing: Standing) -> None:
        for member in standing.ranked:
            before = self._before[member]
            if before is not None:
                gain = float(standing.scores[member]) - before
                self.bandit.observe(standing.values[member], before, self._time, gain)
        self._time += 1

    def _explore(self, standing: Standing, copies: Sequence[tuple[int, int]]) -> dict[int, Values]:
        if not self.bandit.is_ready:
            return super()._explore(standing, copies)
        losers = {loser for loser, _ in copies}
        taken = [values for member, values in enumerate(standing.values) if member not in losers]
        changes: dict[int, Values] = {}
        for loser, winner in copies:
            changes[loser] = self.bandit.propose(
                standing.values[winner], float(standing.scores[winner]), self._time, [*taken, *changes.values()],
                standing.rng, width=self.box_width,
            )  # fmt: skip
        return changes

    def begin_again(self, round_number: int) -> None:
        self._before = [None] * self.num_members

    def state_dict(self) -> dict[str, Any]:
        own = {"before": list(self._before), "time": self._time, "bandit": self.bandit.state_dict()}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._before, self._time = list(state["before"]), state["time"]
        self.bandit.load_state_dict(state["bandit"])
