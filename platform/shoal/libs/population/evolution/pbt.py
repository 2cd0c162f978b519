"""Population based training: truncation selection, then perturbation or resampling (1711.09846).

    exploit: a member of the worst `quantile` copies one of the best `quantile`, drawn uniformly (section 4.1.1,
             truncation selection; the paper's quantile is 0.2)
    explore: each hyper-parameter that it copied is drawn anew with the probability `resample`, else multiplied by one
             of `factors` (section 4.1.1; the paper uses one or the other, never both)

Not of the paper: all members decide together after a round, for they are trained in step; a member whose score is no
number copies one of the best at once; `SearchSpace.perturb` says which values move where multiplication would not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.libs.population.evolution.evolution import Decisions, Evolution, Standing, require_members
from shoal.libs.population.evolution.spec import EvolutionSpec
from shoal.search.space import SearchSpace, Values


class PBT(Evolution):
    """Raises ConfigError for fewer than 2 members."""

    def __init__(
        self, spec: EvolutionSpec, space: SearchSpace, num_members: int, *, num_rounds: int | None = None, seed: int = 0
    ) -> None:
        require_members(num_members, 2, spec.name)
        super().__init__(spec, space, num_members, num_rounds=num_rounds, seed=seed)
        self.num_selected = max(1, int(spec.quantile * num_members))

    def _decide(self, standing: Standing) -> Decisions:
        is_due = self._is_due(standing) and not standing.is_last
        winners = standing.ranked[: self.num_selected]
        worst = (*standing.ranked, *standing.failed)[-self.num_selected :] if is_due else ()
        losers = sorted({*worst, *standing.failed} - set(winners))
        copies = tuple((loser, int(standing.rng.choice(winners))) for loser in losers)
        return Decisions(copies=copies, changes=self._explore(standing, copies), retired=standing.failed)

    def _is_due(self, standing: Standing) -> bool:
        return standing.round_number % self.spec.every == 0

    def _explore(self, standing: Standing, copies: Sequence[tuple[int, int]]) -> dict[int, Values]:
        """New hyper-parameters of each loser."""
        return {loser: self._perturb(standing.values[winner], standing.rng) for loser, winner in copies}

    def _perturb(self, values: Mapping[str, Any], rng: np.random.Generator) -> Values:
        perturbed = self.space.perturb(values, rng, self.spec.factors)
        return self.space.resample(perturbed, rng, self.spec.resample)
