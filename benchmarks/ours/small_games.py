"""Three small games that ask for something else than CartPole: memory, allowed actions, and pictures.

Called by `before`, as `env=FILE:FUNCTION`.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete

LENGTH, MOST_STEPS = 10, 50  # of the T-maze
CHOICES, NUM_DECISIONS = (3, 4), 8
BOARD, SCALE = 10, 4  # of Catch


class TMaze(gymnasium.Env[np.ndarray, int]):
    """A corridor whose first place shows on which side of its end the reward is (Bakker, NeurIPS 2001).

    Returns 4 at best; every step that does not move costs 0.1. Without a memory half of the ends are wrong.
    """

    observation_space, action_space = Box(0, 1, (3,), np.float32), Discrete(4)  # north, east, south, west

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._place, self._steps, self._is_north = 0, 0, bool(self.np_random.integers(2))
        return self._look(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        is_end = self._place == LENGTH and action in (0, 2)
        if is_end:
            reward = 4.0 if (action == 0) == self._is_north else -0.1
        else:
            place = min(max(self._place + {1: 1, 3: -1}.get(int(action), 0), 0), LENGTH)
            reward = -0.1 if place == self._place else 0.0
            self._place = place
        return self._look(), reward, is_end, self._steps == MOST_STEPS, {}

    def _look(self) -> np.ndarray:
        if self._place == LENGTH:
            return np.array([0, 1, 0], np.float32)
        sign = (float(self._is_north), float(not self._is_north)) if self._place == 0 else (1.0, 1.0)
        return np.array([sign[0], 0, sign[1]], np.float32)


class LargestAllowed(gymnasium.Env[np.ndarray, np.ndarray]):
    """Of two groups of numbers the place of the largest allowed one; which are allowed, the mask says. 8 at best."""

    observation_space, action_space = Box(0, 1, (sum(CHOICES),), np.float32), MultiDiscrete(CHOICES)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._deal()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(np.mean(np.asarray(action) == self._best))
        self._steps += 1
        seen, info = self._deal()
        return seen, reward, self._steps == NUM_DECISIONS, False, info

    def _deal(self) -> tuple[np.ndarray, dict[str, Any]]:
        numbers = self.np_random.random(sum(CHOICES)).astype(np.float32)
        mask, self._best, at = self.np_random.random(len(numbers)) < 0.7, [], 0
        for count in CHOICES:
            group = slice(at, at + count)
            mask[at + self.np_random.integers(count)] = True
            self._best.append(int(np.where(mask[group], numbers[group], -1.0).argmax()))
            at += count
        return numbers, {"action_mask": mask}


class Catch(gymnasium.Env[np.ndarray, int]):
    """A ball falls and a paddle catches it, as a picture (Mnih et al., NeurIPS 2014). Returns 1, or -1."""

    observation_space, action_space = Box(0, 255, (SCALE * BOARD, SCALE * BOARD, 1), np.uint8), Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._row, self._ball, self._paddle = 0, int(self.np_random.integers(BOARD)), BOARD // 2
        return self._look(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._row += 1
        self._paddle = min(max(self._paddle + int(action) - 1, 0), BOARD - 1)
        is_end = self._row == BOARD - 1
        reward = 0.0 if not is_end else 1.0 if self._ball == self._paddle else -1.0
        return self._look(), reward, is_end, False, {}

    def _look(self) -> np.ndarray:
        board = np.zeros((BOARD, BOARD), np.uint8)
        board[self._row, self._ball] = board[BOARD - 1, self._paddle] = 255
        return board.repeat(SCALE, 0).repeat(SCALE, 1)[..., None]


def t_maze() -> TMaze:
    return TMaze()


def masked() -> LargestAllowed:
    return LargestAllowed()


def catch() -> Catch:
    return Catch()
