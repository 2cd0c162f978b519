"""Harvest: a small game of pixels, for learning from frames without an emulator."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

SIZE = 10
FALL_PROBABILITY = 0.5  # that something appears in the top row, at each step
STONE_PROBABILITY = 0.4  # that it is a stone
MAX_STEPS = 500
BASKET, APPLE, STONE = range(3)  # channels


class Harvest(gymnasium.Env):  # type: ignore[misc]
    """Apples and stones fall a row a step; a basket in the lowest row moves left, stays, or moves right.

    An apple in the basket gives 1; a stone ends the episode, which is truncated after MAX_STEPS.
    Observes uint8 [10, 10, 3], 255 where there is a basket, an apple or a stone.
    """

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(3)
        self._frame = np.zeros((SIZE, SIZE, 3), np.uint8)
        self._column = self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._frame[:] = 0
        self._column, self._steps = SIZE // 2, 0
        self._frame[-1, self._column, BASKET] = 255
        return self._frame.copy(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        frame = self._frame
        frame[-1, self._column, BASKET] = 0
        self._column = min(SIZE - 1, max(0, self._column + int(action) - 1))
        frame[-1, self._column, BASKET] = 255
        frame[1:, :, APPLE:] = frame[:-1, :, APPLE:].copy()
        frame[0, :, APPLE:] = 0
        if self.np_random.random() < FALL_PROBABILITY:
            kind = STONE if self.np_random.random() < STONE_PROBABILITY else APPLE
            frame[0, self.np_random.integers(SIZE), kind] = 255
        self._steps += 1
        reward = float(frame[-1, self._column, APPLE] > 0)
        is_hit = bool(frame[-1, self._column, STONE] > 0)
        return frame.copy(), reward, is_hit, not is_hit and self._steps >= MAX_STEPS, {}
