"""godot-rl's side of `benchmarks.godot`: its GodotEnv alone, or SB3's PPO through its wrapper, for one Godot game.

python godot_rl_learner.py rate PORT          # any actions, until the game leaves
python godot_rl_learner.py solve PORT SEED    # prints {"solved_s", "steps"} as JSON
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

TARGET, EPISODES, MAX_STEPS = 4.5, 100, 2_000_000


def rate(port: int) -> None:
    """Step with actions that are made before: no policy."""
    from godot_rl.core.godot_env import GodotEnv

    env = GodotEnv(port=port)
    env.reset()
    actions = np.random.default_rng(0).integers(0, 3, (1000, env.num_envs, 1))
    try:
        for number in range(10**9):
            env.step(actions[number % 1000], order_ij=True)
    except (json.JSONDecodeError, OSError):  # the game has left
        return


def solve(port: int, seed: int) -> None:
    """PPO until the mean return of the newest episodes is the target."""
    import torch
    from godot_rl.wrappers.stable_baselines_wrapper import StableBaselinesGodotEnv
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env.vec_monitor import VecMonitor

    torch.set_num_threads(1)
    torch.manual_seed(seed)  # the wrapper takes no seed

    class UntilSolved(BaseCallback):  # type: ignore[misc]
        def _on_step(self) -> bool:
            returns = [episode["r"] for episode in self.model.ep_info_buffer]
            return len(returns) < EPISODES or float(np.mean(returns)) < TARGET

    env = VecMonitor(StableBaselinesGodotEnv(port=port))
    settings: dict[str, Any] = {"n_steps": 32, "batch_size": 128, "n_epochs": 4, "learning_rate": 3e-3, "gamma": 0.8}
    model = PPO("MultiInputPolicy", env, device="cpu", ent_coef=0.01, **settings)
    begun = time.monotonic()
    model.learn(MAX_STEPS, callback=UntilSolved())
    print(json.dumps({"solved_s": time.monotonic() - begun, "steps": model.num_timesteps}), flush=True)


if __name__ == "__main__":
    {"rate": rate, "solve": solve}[sys.argv[1]](*map(int, sys.argv[2:]))
