"""Games whose agents act one after the other, by PettingZoo's AEC methods, as an environment of several agents.

Called when an environment is made, and by the ready loop. PettingZoo itself is not needed: the methods are enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def adapt_aec(environment: Any) -> Any:
    """The environment; one with PettingZoo's AEC methods, which no parallel one has, as one of several agents."""
    methods = ("last", "observe", "observation_space")
    return AECGame(environment) if all(callable(getattr(environment, each, None)) for each in methods) else environment


class AECGame:
    """The agent whose turn it is has an observation, and the others wait. With it comes what its last action was worth:
    the rewards since its last turn. An agent that has ended gets its last observation then, too."""

    last = observe = None  # so that it is no such game itself

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def reset(self, seed: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self._environment.reset(seed=seed)
        observations, _, _, _, infos = self._advance()
        return observations, infos

    def step(self, actions: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        self._environment.step(actions[self._environment.agent_selection])
        return self._advance()

    def _advance(self) -> tuple[dict[str, Any], ...]:
        """To the next agent that acts, past those that have ended, whose only action is None."""
        result: tuple[dict[str, Any], ...] = {}, {}, {}, {}, {}
        while self._environment.agents:
            agent, last = self._environment.agent_selection, self._environment.last()
            for values, value in zip(result, last, strict=True):
                values[agent] = value
            if not (last[2] or last[3]):
                break
            self._environment.step(None)
        return result
