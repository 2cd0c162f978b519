"""Population based training: truncation selection, then other hyper-parameters, by chance or by a bandit.

PBT (1711.09846):

    exploit: a member of the worst `quantile` copies one of the best `quantile`, drawn uniformly (section 4.1.1,
             truncation selection; the paper's quantile is 0.2)
    explore: each hyper-parameter that it copied is drawn again with the probability `resample`, else multiplied by one
             of `factors` (section 4.1.1; the paper uses one or the other, never both)

PB2 (2002.02518) asks a Gaussian process to explore, see `bandit`; until it has observations, losers perturb.

Not of the papers: all members decide together after a round, for they are trained in step; a member whose score is no
number copies one of the best at once; `SearchSpace.perturb` says which values move where multiplication would not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.libs.population.evolution.bandit import Bandit
from shoal.libs.population.evolution.evolution import Decisions, Evolution, Standing
from shoal.search.space import Values


class PBT(Evolution):
    """Raises ConfigError for fewer than 2 members."""

    def _set_up(self) -> None:
        self.require_members(2)
        self.num_selected = max(1, int(self.spec.quantile * self.num_members))

    def _decide(self, standing: Standing) -> Decisions:
        is_due = standing.round_number % self.spec.every == 0 and not standing.is_last
        winners = standing.ranked[: self.num_selected]
        worst = (*standing.ranked, *standing.failed)[-self.num_selected :] if is_due else ()
        losers = sorted({*worst, *standing.failed} - set(winners))
        copies = tuple((loser, int(standing.rng.choice(winners))) for loser in losers)
        return Decisions(copies=copies, changes=self._explore(standing, copies), retired=standing.failed)

    def _explore(self, standing: Standing, copies: Sequence[tuple[int, int]]) -> dict[int, Values]:
        """New hyper-parameters of each loser."""
        spec, rng, changes = self.spec, standing.rng, dict[int, Values]()
        for loser, winner in copies:
            perturbed = self.space.perturb(standing.values[winner], rng, spec.factors)
            changes[loser] = self.space.resample(perturbed, rng, spec.resample)
        return changes


class PB2(PBT):
    """Raises ConfigError for fewer than 2 members."""

    def _set_up(self) -> None:
        super()._set_up()
        self.bandit = Bandit(self.space)
        # The score from which each member's present stretch of training began; None: it began within a stretch.
        self._before: list[float | None] = [None] * self.num_members
        self._time = 0  # decisions so far

    def _decide(self, standing: Standing) -> Decisions:
        is_due = standing.round_number % self.spec.every == 0
        if is_due:
            for member in standing.ranked:
                before = self._before[member]
                if before is not None:
                    gain = float(standing.scores[member]) - before
                    self.bandit.observe(standing.values[member], before, self._time, gain)
            self._time += 1
        decisions = super()._decide(standing)
        if is_due:
            self._before = [float(score) if score == score else None for score in standing.scores]
        for loser, winner in decisions.copies:
            self._before[loser] = float(standing.scores[winner]) if is_due else None
        return decisions

    def _explore(self, standing: Standing, copies: Sequence[tuple[int, int]]) -> dict[int, Values]:
        if not self.bandit.is_ready:
            return super()._explore(standing, copies)
        losers = {loser for loser, _ in copies}
        taken = [values for member, values in enumerate(standing.values) if member not in losers]
        changes: dict[int, Values] = {}
        for loser, winner in copies:
            changes[loser] = self.bandit.propose(
                standing.values[winner],
                float(standing.scores[winner]),
                self._time,
                [*taken, *changes.values()],
                standing.rng,
            )
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
