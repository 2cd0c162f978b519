"""Stable-baselines3, or its JAX sibling sbx, until an environment is solved, with the settings of RL Baselines3 Zoo.

    python -m benchmarks.peers.sb3 '{"algorithm": "ppo", "env": "CartPole-v1", "seed": 0, "target": 475, "cap_s": 90}'

More of a setting: `library`, "stable_baselines3" or "sbx", whose clock includes compilation; `torch_threads`.
Says seconds (from the first environment step) and steps; `solved` is false when the cap came first.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from typing import Any

import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv

from benchmarks.talk import say

WINDOW = 100  # training episodes: so many are in a model's `ep_info_buffer`

# The arguments of each, and as `num_envs` and `schedule_steps` how many environments there are and over how many steps
# schedules run. A pair falls linearly from its first number to zero.
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("ppo", "CartPole-v1"): {
        "num_envs": 8, "schedule_steps": 100_000, "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98,
        "n_epochs": 20, "ent_coef": 0.0, "learning_rate": (0.001, 0), "clip_range": (0.2, 0),
    },
    ("dqn", "CartPole-v1"): {
        "num_envs": 1, "schedule_steps": 50_000, "learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000,
        "learning_starts": 1000, "gamma": 0.99, "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128,
        "exploration_fraction": 0.16, "exploration_final_eps": 0.04, "policy_kwargs": {"net_arch": [256, 256]},
    },
    ("ppo", "Pendulum-v1"): {
        "num_envs": 4, "schedule_steps": 100_000, "n_steps": 1024, "gae_lambda": 0.95, "gamma": 0.9, "n_epochs": 10,
        "ent_coef": 0.0, "learning_rate": 1e-3, "clip_range": 0.2, "use_sde": True, "sde_sample_freq": 4,
    },
    ("sac", "Pendulum-v1"): {"num_envs": 1, "schedule_steps": 20_000, "learning_rate": 1e-3},
}  # fmt: skip


class StopWhenSolved(BaseCallback):
    """Ends the learning at the step at which the mean of the last WINDOW training episodes reaches the target."""

    def __init__(self, target: float, cap_s: float) -> None:
        super().__init__()
        self._target, self._cap_s = target, cap_s
        self._began_s = 0.0
        self.seconds, self.solved = 0.0, False

    @property
    def over(self) -> bool:
        return self.solved or self.seconds >= self._cap_s

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
    environments = make_vec_env(env, n_envs=num_envs, seed=setting["seed"], vec_env_cls=DummyVecEnv)
    kind = getattr(importlib.import_module(setting.get("library", "stable_baselines3")), name.upper())
    model = kind("MlpPolicy", environments, **chosen, seed=setting["seed"], device="cpu")
    callback = StopWhenSolved(setting["target"], setting["cap_s"])
    model.learn(schedule_steps, callback=callback)
    while not callback.over:  # the schedule has run out: go on with half of it
        model.learn(schedule_steps, callback=callback, reset_num_timesteps=False)
    say(seconds=callback.seconds, steps=model.num_timesteps, solved=callback.solved)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
