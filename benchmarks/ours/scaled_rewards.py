"""Games whose rewards are a thousandth of what they are, or a thousand times as much.

Called by `learning_anywhere`, as `env=benchmarks.ours.scaled_rewards:FUNCTION`.
"""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.wrappers import TransformReward


def cartpole_thousandth() -> gymnasium.Env[Any, Any]:
    return scale("CartPole-v1", 0.001)


def cartpole_thousandfold() -> gymnasium.Env[Any, Any]:
    return scale("CartPole-v1", 1000.0)


def frozen_lake_thousandth() -> gymnasium.Env[Any, Any]:
    return scale("FrozenLake-v1", 0.001)


def frozen_lake_thousandfold() -> gymnasium.Env[Any, Any]:
    return scale("FrozenLake-v1", 1000.0)


def scale(name: str, factor: float) -> gymnasium.Env[Any, Any]:
    """The environment `name` with its rewards times `factor`."""
    return TransformReward(gymnasium.make(name), lambda reward: factor * float(reward))
