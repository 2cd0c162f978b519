"""How the members of a population learn from each other: pure decisions from scores and hyper-parameters."""

from shoal.libs.population.evolution.architectures import ARCHITECTURE, list_architectures
from shoal.libs.population.evolution.build import build_evolution
from shoal.libs.population.evolution.evolution import Decisions, Evolution, Restart, select_scores
from shoal.libs.population.evolution.spec import EvolutionSpec

__all__ = [
    "ARCHITECTURE",
    "Decisions",
    "Evolution",
    "EvolutionSpec",
    "Restart",
    "build_evolution",
    "list_architectures",
    "select_scores",
]
