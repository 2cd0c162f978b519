"""The settings of RL Baselines3 Zoo for stable-baselines3, by algorithm and environment; imports nothing.

Called by `sb3`, and by `algorithms`, which repeats an attempt whose settings have changed.

The arguments of each, and as `num_envs` and `schedule_steps` how many environments there are and over how many steps
schedules run; `normalize`: observations and rewards by VecNormalize. A pair falls linearly from its first number to
zero. FrozenLake-v1 is not in the Zoo: there the library's own defaults hold.
"""

from __future__ import annotations

from typing import Any

SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("ppo", "CartPole-v1"): {
        "num_envs": 8, "schedule_steps": 100_000, "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98,
        "n_epochs": 20, "ent_coef": 0.0, "learning_rate": (0.001, 0), "clip_range": (0.2, 0),
    },
    ("ppo", "FrozenLake-v1"): {"num_envs": 1, "schedule_steps": 1_000_000},
    ("ppo", "Acrobot-v1"): {
        "num_envs": 16, "schedule_steps": 1_000_000, "normalize": True, "n_steps": 256, "gae_lambda": 0.94,
        "gamma": 0.99, "n_epochs": 4, "ent_coef": 0.0,
    },
    ("ppo", "LunarLander-v3"): {
        "num_envs": 16, "schedule_steps": 1_000_000, "n_steps": 1024, "batch_size": 64, "gae_lambda": 0.98,
        "gamma": 0.999, "n_epochs": 4, "ent_coef": 0.01,
    },
    ("dqn", "CartPole-v1"): {
        "num_envs": 1, "schedule_steps": 50_000, "learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000,
        "learning_starts": 1000, "gamma": 0.99, "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128,
        "exploration_fraction": 0.16, "exploration_final_eps": 0.04, "policy_kwargs": {"net_arch": [256, 256]},
    },
    ("sac", "Pendulum-v1"): {"num_envs": 1, "schedule_steps": 20_000, "learning_rate": 1e-3},
    ("sac", "MountainCarContinuous-v0"): {
        "num_envs": 1, "schedule_steps": 50_000, "learning_rate": 3e-4, "buffer_size": 50_000, "batch_size": 512,
        "ent_coef": 0.1, "train_freq": 32, "gradient_steps": 32, "gamma": 0.9999, "tau": 0.01, "learning_starts": 0,
        "use_sde": True, "policy_kwargs": {"log_std_init": -3.67, "net_arch": [64, 64]},
    },
}  # fmt: skip
