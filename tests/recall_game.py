"""A small game of memory; `python recall_game.py ADDRESS TOKEN ACTOR_ID SEED` is an actor that plays two at once."""

import sys
from typing import Any

import numpy as np

from shoal.actor import ActorClient, play

NUM_STEPS = 6


class RecallGame:
    """The first observation shows a sign, the others nothing. The last action is rewarded if it tells the sign.

    Returns 1 at best, and 0.5 on average without a memory.
    """

    def __init__(self) -> None:
        self._random = np.random.default_rng()

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._random = np.random.default_rng(seed) if seed is not None else self._random
        self._steps, self._is_positive = 0, bool(self._random.integers(2))
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        is_last = self._steps == NUM_STEPS
        return self._observe(), float(is_last and action == int(self._is_positive)), is_last, False, {}

    def _observe(self) -> np.ndarray:
        cue = (1.0 if self._is_positive else -1.0) if self._steps == 0 else 0.0
        return np.array([cue, self._steps / NUM_STEPS, self._steps == NUM_STEPS - 1, 1.0], np.float32)


if __name__ == "__main__":
    address, token, actor_id, seed = sys.argv[1:]
    with ActorClient(address, token, actor_id, timeout_s=60) as client:
        play([RecallGame(), RecallGame()], client, seed=int(seed))
