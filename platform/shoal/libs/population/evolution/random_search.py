"""Random search: each member keeps the hyper-parameters that it drew (Bergstra & Bengio, 2012)."""

from __future__ import annotations

from shoal.libs.population.evolution.evolution import Decisions, Evolution, Standing


class RandomSearch(Evolution):
    """A member whose score is no number is stopped."""

    def _decide(self, standing: Standing) -> Decisions:
        return Decisions(retired=standing.failed, stopped=standing.failed)
