"""Stable-baselines3, or its JAX sibling sbx, until an environment is solved, with the settings of RL Baselines3 Zoo.

    python -m benchmarks.peers.sb3 '{"algorithm": "ppo", "env": "CartPole-v1", "seed": 0, "target": 475, "cap_s": 90}'

More of a setting: `library`, "stable_baselines3" or "sbx", whose clock includes compilation; `torch_threads`;
`max_steps`, a cap in environment steps. Says seconds (from the first environment step) and steps; `solved` is false
when a cap came first.
"""

from __future__ import annotations

import importlib
import json
import math
import statistics
import sys
import time
from typing import Any

import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from benchmarks.peers.sb3_settings import SETTINGS
from benchmarks.talk import say

WINDOW = 100  # training episodes: so many are in a model's `ep_info_buffer`, with returns as the environment gave them


class StopWhenSolved(BaseCallback):
    """Ends the learning at the step at which the mean of the last WINDOW training episodes reaches the target."""

    def __init__(self, target: float, cap_s: float, max_steps: float) -> None:
        super().__init__()
        self._target, self._cap_s, self._max_steps = target, cap_s, max_steps
        self._began_s = 0.0
        self.seconds, self.solved = 0.0, False

    @property
    def over(self) -> bool:
        return self.solved or self.seconds >= self._cap_s or self.num_timesteps >= self._max_steps

    def _on_rollout_start(self) -> None:
        self._began_s = self._began_s or time.perf_counter()

    def _on_step(self) -> bool:
        self.seconds = time.perf_counter() - self._began_s
        returns = [episode["r"] for episode in self.model.ep_info_buffer or ()]
        self.solved = len(returns) == WINDOW and statistics.fmean(returns) >= self._target
        return not self.over


def to_schedule(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    first, last = value
    return lambda remaining: last + (first - last) * remaining


def main(setting: dict[str, Any]) -> None:
    name, env = setting["algorithm"], setting["env"]
    if setting.get("torch_threads"):
        torch.set_num_threads(setting["torch_threads"])
    chosen = {key: to_schedule(value) for key, value in SETTINGS[name, env].items()}
    num_envs, schedule_steps = chosen.pop("num_envs"), chosen.pop("schedule_steps")
    environments: VecEnv = make_vec_env(env, n_envs=num_envs, seed=setting["seed"], vec_env_cls=DummyVecEnv)
    if chosen.pop("normalize", False):
        environments = VecNormalize(environments, gamma=chosen["gamma"])  # as the Zoo does
    kind = getattr(importlib.import_module(setting.get("library", "stable_baselines3")), name.upper())
    model = kind("MlpPolicy", environments, **chosen, seed=setting["seed"], device="cpu")
    callback = StopWhenSolved(setting["target"], setting["cap_s"], setting.get("max_steps", math.inf))
    model.learn(schedule_steps, callback=callback)
    while not callback.over:  # the schedule has run out: go on with half of it
        model.learn(schedule_steps, callback=callback, reset_num_timesteps=False)
    say(seconds=callback.seconds, steps=model.num_timesteps, solved=callback.solved)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
