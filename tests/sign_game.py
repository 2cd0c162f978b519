"""A small game of one decision a step; `python sign_game.py ADDRESS TOKEN ACTOR_ID SEED` is an actor that plays it."""

import sys
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from shoal.actor import ActorClient, play


class SignGame:
    """Eight steps; the right action tells the sign of the first number that is seen. Returns 8 at best, 4 by chance."""

    observation_space, action_space = Box(-1, 1, (4,), np.float32), Discrete(2)

    def __init__(self) -> None:
        self._random = np.random.default_rng()

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._random = np.random.default_rng(seed) if seed is not None else self._random
        self._steps = 0
        return self._look(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(action == int(self._seen[0] > 0))
        self._steps += 1
        return self._look(), reward, False, self._steps == 8, {}

    def _look(self) -> np.ndarray:
        self._seen = self._random.uniform(-1, 1, 4).astype(np.float32)
        return self._seen


if __name__ == "__main__":
    address, token, actor_id, seed = sys.argv[1:]
    with ActorClient(address, token, actor_id, timeout_s=60) as client:
        play(SignGame(), client, seed=int(seed))
