"""The configuration of an algorithm, chosen by its name: `algorithm=impala`, `algorithm.learning_rate=0.002`.

Owns the table of algorithms. Imports no torch: launchers and the gateway read a spec without computing.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny

from shoal.config import Spec

# The configuration and the algorithm of each: modules are imported at their first use.
CONFIGS = {
    "impala": "shoal.rl.algorithms.impala.config:ImpalaConfig",
    "ppo": "shoal.rl.algorithms.ppo.config:PPOConfig",
}
ALGORITHMS = {
    "impala": "shoal.rl.algorithms.impala.algorithm:Impala",
    "ppo": "shoal.rl.algorithms.ppo.algorithm:PPO",
}


class AlgorithmConfig(Spec):
    """What every algorithm has. Subclasses give `name` a default, their word."""

    name: str

    @classmethod
    def from_override(cls, word: str, before: Mapping[str, Any]) -> object:
        """Another algorithm begins with its own defaults."""
        return before if word == before.get("name") else {"name": word}

    @classmethod
    def choose_type(cls, values: Mapping[str, Any]) -> type[Spec]:
        return find_config_type(values.get("name"))


def find_config_type(name: object) -> type[AlgorithmConfig]:
    """The configuration of the algorithm `name`. Raises ValueError."""
    if name not in CONFIGS:
        raise ValueError(f"{name!r} is no algorithm: there is {', '.join(CONFIGS)}")
    found: type[AlgorithmConfig] = load_named(CONFIGS[str(name)])
    return found


def load_named(place: str) -> Any:
    """What `module:name` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _parse_config(value: object) -> object:
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, Mapping):
        return find_config_type(value.get("name")).parse(value)
    return value


AnyAlgorithmConfig = Annotated[SerializeAsAny[AlgorithmConfig], BeforeValidator(_parse_config)]
