"""The film of 500 steps of CartPole, beside gymnasium's RecordVideo.

    python -m benchmarks.films [--runs N] [--quick]

A registered policy, whose weights are written by hand so that it balances the pole for all 500 steps, is played by
`shoal play`, with and without `--record film.webp`; the peer plays the same controller, with and without RecordVideo
(benchmarks/films.txt, in .venv-films). All four are processes of their own that take turns. The seconds beyond playing
are those of a process with a film less those of one without: what is imported for it counts. Our film also shows the
value, the rewards and the probability of each choice; the peer's shows the game alone. Needs the extra `films`.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.children import FILMS, OUR_PYTHON, ROOT
from benchmarks.result import compare, options, write

BAR_S, BAR_MB = 3.0, 1.0
WEIGHTS = (0.05, 0.1, 1.0, 0.5)  # of place, speed, angle and its speed: their sum's sign is the way to push
PEER_TEXT = """
import sys
import gymnasium
environment = gymnasium.make("CartPole-v1", render_mode="rgb_array" if len(sys.argv) > 1 else None)
if len(sys.argv) > 1:
    environment = gymnasium.wrappers.RecordVideo(environment, sys.argv[1], disable_logger=True)
observation, _ = environment.reset(seed=0)
ended, steps = False, 0
while not ended:
    action = int(sum(a * b for a, b in zip({weights}, observation)) > 0)
    observation, _, terminated, truncated, _ = environment.step(action)
    ended, steps = terminated or truncated, steps + 1
environment.close()
print(steps)
"""


def register_balancer(home: str) -> None:
    """The policy, as `cartpole@1`."""
    os.environ["SHOAL_HOME"] = home
    import torch

    from shoal.flows.actor_learner_spec import ActorLearnerSpec
    from shoal.flows.rl_policy import describe_policy_model, inspect_environment, register_policy
    from shoal.weights import WeightSnapshot

    spec = ActorLearnerSpec(env="CartPole-v1").override(["algorithm=ppo"])
    experience, _ = inspect_environment(spec)
    model: Any = describe_policy_model(spec, experience)[0].build()
    tensors = {name: torch.zeros_like(each) for name, each in model.state_dict().items()}
    layers = experience.policy.layers
    tensors[layers[0][0]][0] = torch.tensor(WEIGHTS)
    tensors[layers[1][0]][0, 0] = 1.0
    tensors[layers[2][0]][:, 0] = torch.tensor([-20.0, 20.0])
    weights = WeightSnapshot.of(1, {name: each.numpy() for name, each in tensors.items()})
    register_policy(spec, experience, weights, "run", {"mean_return": 500, "steps": 1})


def run(*command: str) -> np.ndarray:
    """The seconds of a process, which has played 500 steps, and those of processors."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if "500" not in ran.stdout:
        raise SystemExit(f"{command} played no 500 steps: {ran.stdout}")
    return np.array([took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime])


def main() -> None:
    chosen = options(__doc__, runs=5)
    ours, peers, megabytes = list[np.ndarray](), list[np.ndarray](), list[tuple[float, float]]()
    peer_text = PEER_TEXT.replace("{weights}", str(WEIGHTS))
    with tempfile.TemporaryDirectory() as home:
        register_balancer(home)
        film, folder = Path(home) / "film.webp", Path(home) / "peer"
        play = (OUR_PYTHON, "-m", "shoal", "play", "cartpole", "--episodes", "1")
        peer = (str(FILMS / "bin" / "python"), "-c", peer_text)
        for _ in range(chosen.runs):
            without, peer_without = run(*play), run(*peer)
            ours.append(run(*play, "--record", str(film)) - without)
            peers.append(run(*peer, str(folder)) - peer_without)
            peer_bytes = sum(each.stat().st_size for each in folder.glob("*.mp4"))
            megabytes.append((film.stat().st_size / 1e6, peer_bytes / 1e6))
    seconds = [[[float(each[kind]) for each in side] for side in (ours, peers)] for kind in (0, 1)]
    sizes = [list(side) for side in zip(*megabytes, strict=True)]
    name, peer_name = "film of 500 steps, beyond playing", "gymnasium RecordVideo"
    rows = [
        compare(name, "s", "lower", *seconds[0], peer_name, BAR_S, "value"),
        compare(f"{name}, of processors", "s", "lower", *seconds[1], peer_name),
        compare("its size", "MB", "lower", *sizes, peer_name, BAR_MB, "value", note="the peer's has the game alone"),
    ]
    write("films", rows, chosen.results)


if __name__ == "__main__":
    sys.exit(main())
