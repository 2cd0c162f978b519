"""Population based training: truncation selection, then other hyper-parameters by chance.

PBT (1711.09846):

    exploit: a member of the worst `quantile` copies one of the best `quantile`, drawn uniformly (section 4.1.1,
             truncation selection; the paper's quantile is 0.2)
    explore: each hyper-parameter that it copied is drawn again with the probability `resample`, else multiplied by one
             of `factors` (section 4.1.1; the paper uses one or the other, never both)

Not of the paper: all members decide together after a round, for they are trained in step; a member whose score is no
number copies one of the best at once; `SearchSpace.perturb` says which values move where multiplication would not.
"""

from __future__ import annotations

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
        changes: dict[int, Values] = {}
        for loser, winner in copies:
            perturbed = self.space.perturb(standing.values[winner], standing.rng, self.spec.factors)
            changes[loser] = self.space.resample(perturbed, standing.rng, self.spec.resample)
        return Decisions(copies=copies, changes=changes, retired=standing.failed)
