"""A small game of one number a step."""

from typing import Any

import numpy as np
from gymnasium.spaces import Box


class AimGame:
    """Eight steps; the best action is twice the number that is seen, and every distance from it costs. 8 at best; about
    1 by an action that knows nothing."""

    observation_space, action_space = Box(-1, 1, (1,), np.float32), Box(-2, 2, (1,), np.float32)

    def __init__(self) -> None:
        self._random = np.random.default_rng()

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._random = np.random.default_rng(seed) if seed is not None else self._random
        self._steps = 0
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert action.shape == (1,)
        assert abs(action[0]) <= 2
        reward = 1 - abs(float(action[0]) - 2 * float(self._seen[0]))
        self._steps += 1
        return self._observe(), reward, False, self._steps == 8, {}

    def _observe(self) -> np.ndarray:
        self._seen = self._random.uniform(-1, 1, 1).astype(np.float32)
        return self._seen
