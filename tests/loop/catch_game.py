"""`catch.js` for Python actors, and for the run: `env=catch:Catch-v0`, in this folder."""

from typing import Any

import gymnasium
import numpy as np

COLUMNS = 5
ROWS = 6
APPLES = 5


class Catch(gymnasium.Env):  # type: ignore[misc]
    """Apples fall, a basket moves left, stays, or moves right. An apple that is caught gives 1, one that is missed -1.

    Observes float32 [4] in [-1, 1]: the basket's column, the apple's column and row, how far the apple is to the right.
    """

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._basket, self._apples = COLUMNS // 2, 0
        self._drop()
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._basket = min(COLUMNS - 1, max(0, self._basket + int(action) - 1))
        self._row += 1
        reward = 0.0
        if self._row == ROWS - 1:
            reward = 1.0 if self._column == self._basket else -1.0
            self._apples += 1
            self._drop()
        return self._observe(), reward, self._apples == APPLES, False, {}

    def _drop(self) -> None:
        self._column, self._row = int(self.np_random.integers(COLUMNS)), 0

    def _observe(self) -> np.ndarray:
        basket, column = 2 * self._basket / (COLUMNS - 1) - 1, 2 * self._column / (COLUMNS - 1) - 1
        distance = (self._column - self._basket) / (COLUMNS - 1)
        return np.array([basket, column, 2 * self._row / (ROWS - 1) - 1, distance], np.float32)


gymnasium.register("Catch-v0", Catch)
