"""The evolution of a spec. Called by flows."""

from __future__ import annotations

from shoal.libs.population.evolution.architectures import ARCHITECTURE, ArchitectureEvolution
from shoal.libs.population.evolution.evolution import Evolution
from shoal.libs.population.evolution.growing_pbt import GrowingPBT
from shoal.libs.population.evolution.halving import Halving
from shoal.libs.population.evolution.pb2 import PB2
from shoal.libs.population.evolution.pbt import PBT
from shoal.libs.population.evolution.random_search import RandomSearch
from shoal.libs.population.evolution.spec import EvolutionSpec
from shoal.search.space import SearchSpace

EVOLUTIONS: dict[str, type[Evolution]] = {
    "growing_pbt": GrowingPBT,
    "pbt": PBT,
    "pb2": PB2,
    "halving": Halving,
    "random_search": RandomSearch,
}


def build_evolution(
    spec: EvolutionSpec, space: SearchSpace, num_members: int, *, num_rounds: int | None = None, seed: int = 0
) -> Evolution:
    """With arguments of the Task in the space, one for each architecture. Raises ConfigError where the evolution needs
    more members, or a number of rounds."""

    def make(space: SearchSpace, num_members: int, seed: int) -> Evolution:
        return EVOLUTIONS[spec.name](spec, space, num_members, num_rounds=num_rounds, seed=seed)

    if not any(path.startswith(ARCHITECTURE) for path in space):
        return make(space, num_members, seed)
    return ArchitectureEvolution(spec, space, num_members, make, num_rounds=num_rounds, seed=seed)
