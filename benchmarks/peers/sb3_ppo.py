"""Stable-baselines3's PPO on CartPole-v1 until it is solved, with the settings of RL Baselines3 Zoo.

    python -m benchmarks.peers.sb3_ppo '{"seed": 0, "torch_threads": null, "target": 475, "cap_s": 90}'

Says seconds (from the first environment step) and steps; `solved` is false when the cap came first.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv

from benchmarks.talk import say

WINDOW = 100  # training episodes
SCHEDULE_STEPS = 100_000  # over which learning rate and clip range fall to zero


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


def main(setting: dict[str, Any]) -> None:
    if setting["torch_threads"]:
        torch.set_num_threads(setting["torch_threads"])
    environments = make_vec_env("CartPole-v1", n_envs=8, seed=setting["seed"], vec_env_cls=DummyVecEnv)
    model = PPO(
        "MlpPolicy",
        environments,
        n_steps=32,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        ent_coef=0.0,
        learning_rate=lambda remaining: 0.001 * remaining,
        clip_range=lambda remaining: 0.2 * remaining,
        stats_window_size=WINDOW,
        seed=setting["seed"],
        device="cpu",
    )
    callback = StopWhenSolved(setting["target"], setting["cap_s"])
    model.learn(SCHEDULE_STEPS, callback=callback)
    while not callback.over:  # the schedule has run out: go on with half of it
        model.learn(SCHEDULE_STEPS, callback=callback, reset_num_timesteps=False)
    say(seconds=callback.seconds, steps=model.num_timesteps, solved=callback.solved)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
