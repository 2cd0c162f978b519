"""RLlib's PPO or IMPALA on CartPole-v1 until it is solved: new API stack, the settings of RLlib's own tuned examples.

    python -m benchmarks.peers.rllib '{"algorithm": "ppo", "seed": 0, "target": 475, "cap_s": 90, "folder": "/tmp/x"}'

Says seconds (from the start of sampling) and steps; `solved` is false when the cap came first. Ray is one of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from benchmarks.talk import say

WINDOW = 100  # training episodes
CHECK_S = 0.5  # how often the mean return is looked at


def configure(name: str) -> Any:
    """The algorithm's own settings."""
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    if name == "ppo":
        model = DefaultModelConfig(fcnet_hiddens=[32], fcnet_activation="linear", vf_share_layers=True)
        return PPOConfig().training(lr=0.0003, num_epochs=6, vf_loss_coeff=0.01).rl_module(model_config=model)
    return (
        IMPALAConfig()
        .training(
            train_batch_size_per_learner=500,
            grad_clip=40.0,
            grad_clip_by="global_norm",
            lr=0.0005,
            vf_loss_coeff=0.05,
            entropy_coeff=0.0,
        )
        .rl_module(model_config=DefaultModelConfig(vf_share_layers=True))
    )


def main(setting: dict[str, Any]) -> None:
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=os.urandom(32).hex(), RAY_ENABLE_UV_RUN_RUNTIME_ENV="0")
    import ray

    ray.init(
        _temp_dir=setting["folder"], _node_ip_address="127.0.0.1", num_cpus=4, include_dashboard=False,
        log_to_driver=False,
    )  # fmt: skip
    config = (
        configure(setting["algorithm"])
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=8)
        .reporting(min_time_s_per_iteration=CHECK_S, metrics_num_episodes_for_smoothing=WINDOW)
        .debugging(seed=setting["seed"])
    )
    algorithm = config.build_algo()
    began_s = time.perf_counter()
    seconds, steps, solved = 0.0, 0, False
    while not solved and seconds < setting["cap_s"]:
        measured = algorithm.train().get("env_runners", {})
        seconds = time.perf_counter() - began_s
        steps = int(measured.get("num_env_steps_sampled_lifetime", 0))
        enough = measured.get("num_episodes_lifetime", 0) >= WINDOW
        solved = enough and measured.get("episode_return_mean", 0.0) >= setting["target"]
    say(seconds=seconds, steps=steps, solved=bool(solved))
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
