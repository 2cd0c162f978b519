"""What Pursuit and Tag have in common: a prey on a grid that is caught in time, or not. Several agents move at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np

MAX_STEPS = 40
STEP_COST = 0.05
MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))
PREY = "prey"
Observations = dict[str, np.ndarray]


class Chase:
    """PettingZoo's parallel API by its methods.

    When the prey is caught, each hunter gets 1 and the episode ends; until then each step costs a hunter STEP_COST. The
    prey, where it is an agent, gets the opposite. After MAX_STEPS the episode is truncated.
    """

    possible_agents: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._random = np.random.default_rng()
        self.agents: list[str] = []
        self._steps = 0

    def action_space(self, agent: str) -> gymnasium.spaces.Discrete:
        """The same for all: stay, or move up, down, left or right."""
        return gymnasium.spaces.Discrete(len(MOVES))

    def reset(self, seed: int | None = None) -> tuple[Observations, dict[str, Any]]:
        """Place all at random."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self.agents, self._steps = list(self.possible_agents), 0
        self._set_positions()
        return self._observe(), {agent: {} for agent in self.agents}

    def step(self, actions: Mapping[str, int]) -> tuple[dict[str, Any], ...]:
        """Move all."""
        is_caught = self._move(actions)
        self._steps += 1
        is_late = not is_caught and self._steps >= MAX_STEPS
        agents = self.agents
        self.agents = [] if is_caught or is_late else agents
        reward = 1.0 if is_caught else -STEP_COST
        return (
            self._observe(),
            {agent: -reward if agent == PREY else reward for agent in agents},
            dict.fromkeys(agents, is_caught),
            dict.fromkeys(agents, is_late),
            {agent: {} for agent in agents},
        )

    def close(self) -> None:
        """Nothing is open."""

    def _set_positions(self) -> None:
        raise NotImplementedError

    def _move(self, actions: Mapping[str, int]) -> bool:
        """Whether the prey is caught then."""
        raise NotImplementedError

    def _observe(self) -> Observations:
        raise NotImplementedError
