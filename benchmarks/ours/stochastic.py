"""An environment whose best policy is random, as Ocean's Stochastic (pufferlib): play action 0 in P of all steps.

`make` is for `env=benchmarks.ours.stochastic:make`. The observation tells nothing, so no fixed action keeps the share.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

P, NUM_STEPS = 0.75, 100


class Stochastic(gymnasium.Env[np.ndarray, int]):
    """A step is rewarded that brings the share of action 0 so far nearer to P: by 1 - (P - share)², over NUM_STEPS."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space: Any = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self._num_steps = self._num_zeros = 0

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._num_steps = self._num_zeros = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._num_steps += 1
        self._num_zeros += int(action == 0)
        share = self._num_zeros / self._num_steps
        is_rewarded = share < P if action == 0 else share >= P
        reward = is_rewarded * (1.0 - (P - share) ** 2) / NUM_STEPS
        return np.zeros(1, np.float32), reward, self._num_steps == NUM_STEPS, False, {}


def make() -> Stochastic:
    """The environment."""
    return Stochastic()
