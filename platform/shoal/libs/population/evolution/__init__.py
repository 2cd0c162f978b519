"""How the members of a population learn from each other: pure decisions from scores and hyper-parameters."""

from shoal.libs.population.evolution.architectures import ARCHITECTURE, build_evolution, list_architectures
from shoal.libs.population.evolution.evolution import Decisions, Evolution
from shoal.libs.population.evolution.spec import EvolutionSpec

__all__ = [
    "ARCHITECTURE",
    "Decisions",
    "Evolution",
    "EvolutionSpec",
    "build_evolution",
    "list_architectures",
]
