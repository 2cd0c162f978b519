"""How the members of a population learn from each other: pure decisions from scores and hyper-parameters."""

from __future__ import annotations

from shoal.libs.population.evolution.evolution import Decisions, Evolution, RandomSearch
from shoal.libs.population.evolution.halving import Halving
from shoal.libs.population.evolution.pbt import PBT
from shoal.libs.population.evolution.spec import EvolutionSpec
from shoal.search.space import SearchSpace

__all__ = ["Decisions", "Evolution", "EvolutionSpec", "build_evolution"]

EVOLUTIONS: dict[str, type[Evolution]] = {"pbt": PBT, "halving": Halving, "random_search": RandomSearch}


def build_evolution(
    spec: EvolutionSpec, space: SearchSpace, num_members: int, *, num_rounds: int, seed: int = 0
) -> Evolution:
    """Build one. Raises ConfigError where it needs more members, or more rounds."""
    return EVOLUTIONS[spec.name](spec, space, num_members, num_rounds=num_rounds, seed=seed)
