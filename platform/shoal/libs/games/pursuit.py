"""Pursuit: two hunters on a grid corner a prey together. For learning with several agents, by self-play."""

from __future__ import annotations

from collections.abc import Mapping

import gymnasium
import numpy as np

from shoal.libs.games.chase import MOVES, Chase, Observations

SIZE = 5
FLIGHT_PROBABILITY = 0.2  # that the prey moves, at each step


class Pursuit(Chase):
    """Two hunters and a prey on a grid of 5 x 5, whose edges are joined. PettingZoo's parallel API by its methods.

    The prey is caught when both hunters are on its field or beside it: then each gets 1 and the episode ends. Until
    then each step costs 0.05, and after MAX_STEPS the episode is truncated. A hunter stays, or moves up, down, left or
    right. It observes float32 [4]: how far down and to the right the prey is, and then the other hunter, in halves of
    the way around the grid.
    """

    possible_agents = ("first", "second")

    def observation_space(self, agent: str) -> gymnasium.spaces.Box:
        """The same for both."""
        return gymnasium.spaces.Box(-1, 1, (4,), np.float32)

    def _set_positions(self) -> None:
        """The prey is not caught yet."""
        while True:
            positions = self._random.integers(0, SIZE, (3, 2)).tolist()
            self._prey, self._positions = positions[2], dict(zip(self.possible_agents, positions[:2], strict=True))
            if not self._is_caught():
                return

    def _move(self, actions: Mapping[str, int]) -> bool:
        """The hunters, and then the prey, unless it is caught."""
        for agent, action in actions.items():
            self._positions[agent] = _move(self._positions[agent], int(action))
        is_caught = self._is_caught()
        if not is_caught and self._random.random() < FLIGHT_PROBABILITY:
            self._prey = _move(self._prey, int(self._random.integers(len(MOVES))))
        return is_caught

    def _is_caught(self) -> bool:
        offsets = [_find_offset(position, self._prey) for position in self._positions.values()]
        return all(abs(down) + abs(right) <= 1 for down, right in offsets)

    def _observe(self) -> Observations:
        first, second = self._positions.values()
        seen = ((first, second), (second, first))
        return {
            agent: np.array([*_find_offset(own, self._prey), *_find_offset(own, other)], np.float32) / (SIZE // 2)
            for agent, (own, other) in zip(self.possible_agents, seen, strict=True)
        }


def _move(position: list[int], action: int) -> list[int]:
    return [(coordinate + step) % SIZE for coordinate, step in zip(position, MOVES[action], strict=True)]


def _find_offset(position: list[int], other: list[int]) -> list[int]:
    """The shortest way down and to the right, around the edges."""
    half = SIZE // 2
    return [(there - here + half) % SIZE - half for here, there in zip(position, other, strict=True)]
