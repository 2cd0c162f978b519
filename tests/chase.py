"""A tiny game of several agents, with PettingZoo's parallel API by its methods and without the library."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

LENGTHS = {"red": 5, "green": 8, "blue": 11}  # steps until an agent leaves; the last one is truncated


class Chase:
    """Each agent sees a random number and its own; the right action tells the sign of the number."""

    possible_agents = tuple(LENGTHS)

    def __init__(self, has_turns: bool = False) -> None:
        self._random, self._has_turns = np.random.default_rng(), has_turns
        self.agents: list[str] = []
        self.seeds: list[int | None] = []

    def observation_space(self, agent: str) -> Box:
        return Box(-10, 10, (4,), np.float32)

    def action_space(self, agent: str) -> Discrete:
        return Discrete(2)

    def reset(self, seed: int | None = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        self._random = np.random.default_rng(seed) if seed is not None else self._random
        self.seeds.append(seed)
        self.agents = list(LENGTHS)
        self._steps = dict.fromkeys(LENGTHS, 0)
        self._clock = 0
        self._seen = {agent: self._look(agent) for agent in self.agents}
        return {agent: self._seen[agent] for agent in self._find_turn()}, {}

    def step(self, actions: Mapping[str, int]) -> tuple[dict[str, Any], ...]:
        assert set(actions) == set(self._find_turn())
        # In a game of turns, everybody who waits gets 0.25: a reward between an agent's actions.
        rewards = {agent: 0.25 for agent in self.agents if agent not in actions}
        for agent, action in actions.items():
            rewards[agent] = float(action == int(self._seen[agent][0] > 0))
            self._steps[agent] += 1
            self._seen[agent] = self._look(agent)
        ended = [agent for agent in actions if self._steps[agent] == LENGTHS[agent]]
        terminations = {agent: agent in ended and agent != "blue" for agent in self.agents}
        truncations = {agent: agent in ended and agent == "blue" for agent in self.agents}
        self.agents = [agent for agent in self.agents if agent not in ended]
        self._clock += 1
        observations = {agent: self._seen[agent] for agent in (*self._find_turn(), *ended)}
        return observations, rewards, terminations, truncations, {agent: {} for agent in observations}

    def close(self) -> None: ...

    def _find_turn(self) -> list[str]:
        return [self.agents[self._clock % len(self.agents)]] if self._has_turns and self.agents else self.agents

    def _look(self, agent: str) -> np.ndarray:
        number = self._random.uniform(-1, 1)
        return np.array([number, list(LENGTHS).index(agent), self._steps[agent], 0], np.float32)


def make_turns() -> Chase:
    return Chase(has_turns=True)
