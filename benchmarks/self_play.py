"""NashConv in Kuhn poker of self-play with external actors: the average over the pool, and its newest member.

    python -m benchmarks.self_play [--runs N] [--quick]

The newest policy learns against versions drawn from the pool (fictitious play). What it leads to is the average policy
of the pool, whose NashConv is computed exactly; 0 is an equilibrium, uniform play has 0.917. A run ends after NUM_STEPS
steps of the learning agent. Each run has fresh weights and another seed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.children import OUR_PYTHON, ROOT, scratch
from benchmarks.ours.kuhn_poker import TURNS, Strategy, average, nash_conv, observe
from benchmarks.result import compare, options, write
from shoal.actor.policy import EpsilonGreedyPolicy, make_policy
from shoal.flows.rl_policy import inspect_environment
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec
from shoal.weights import decode_tensors
from shoal.wire import ExperienceSpec

ENV = "benchmarks.ours.kuhn_poker:make"
NUM_ACTORS, NUM_ENVS, NUM_STEPS, QUICK_STEPS = 2, 32, 750_000, 20_000
BAR = 0.05
TIMEOUT_S = 3600.0
TOKEN = os.urandom(16).hex()
# DQN finds a best response to the mixture soon, which is what fictitious play asks for. The replay is short, since old
# episodes are against an older mixture. Policy gradients of a nearly certain policy are too small to follow it.
SPEC = RLSpec(env=ENV).override(
    [
        *("algorithm=dqn", "hidden=[64]", "segment_length=8", "self_play.snapshot_every=2500"),
        *("gateway.queue_capacity=256", "gateway.max_credits=128"),
        *("algorithm.discount=1", "algorithm.num_steps=1", "algorithm.learning_rate=0.003", "algorithm.batch_size=128"),
        *("algorithm.epsilon=0.06", "algorithm.epsilon_exponent=0", "algorithm.epsilon_steps=3000"),
        "algorithm.replay_mb=1",
    ]
)


def read_strategy(experience: ExperienceSpec, version: int, weights: Mapping[str, np.ndarray]) -> Strategy:
    """The choices of these weights at each of the twelve points of decision, without exploration."""
    policy = make_policy(experience.policy)
    policy.load(version, weights)
    assert isinstance(policy, EpsilonGreedyPolicy)
    found = {}
    for card in range(3):
        for history in TURNS:
            best = int(policy.compute_outputs(observe(card, history)[None])[0].argmax())
            found[card, history] = (float(best == 0), float(best == 1))
    return found


def train(seed: int, num_steps: int, folder: Path) -> list[Strategy]:
    """The members of the pool after `num_steps`, in order."""
    spec = SPEC.update({"learner": {"seed": seed}})
    experience, _ = inspect_environment(spec)
    environment = {**os.environ, "SHOAL_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with ExitStack() as opened, LocalLoop(spec, experience, folder, TOKEN) as loop:
        words = [OUR_PYTHON, "-m", "shoal.actor", "--connect", loop.address, "--env", ENV, "--envs", str(NUM_ENVS)]
        words += ["--processes", str(NUM_ACTORS), "--seed", str(100 * seed), "--lifeline"]
        actors = opened.enter_context(subprocess.Popen(words, stdin=subprocess.PIPE, env=environment))
        opened.callback(actors.terminate)
        deadline = time.monotonic() + TIMEOUT_S
        while loop.gateway.stats()["steps"] < num_steps:
            if actors.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the actors ended (status {actors.returncode}), or it took more than {TIMEOUT_S:g} s")
            time.sleep(0.2)
    paths = sorted((folder / "opponents").glob("*.safetensors"), key=lambda path: int(path.stem))
    return [read_strategy(experience, int(path.stem), decode_tensors(path.read_bytes())) for path in paths]


def main() -> None:
    chosen = options(__doc__, runs=3)
    averages, newest = [], []
    with scratch() as folder:
        for seed in range(chosen.runs):
            began_s = time.monotonic()
            pool = train(seed, QUICK_STEPS if chosen.quick else NUM_STEPS, folder / f"run-{seed}")
            averages.append(nash_conv(average(pool)))
            newest.append(nash_conv(pool[-1]))
            print(
                f"run {seed + 1}: NashConv {averages[-1]:.3f}, of the newest {newest[-1]:.3f}; {len(pool)} members,"
                f" {time.monotonic() - began_s:.0f} s",
                flush=True,
            )
    name = "self-play in Kuhn poker: NashConv of the average over the pool"
    note = f"after {NUM_STEPS:,} steps of the learning agent; uniform play has 0.917"
    row = compare(name, "", "lower", averages, newest, "the newest version alone", bar=BAR, bar_kind="value", note=note)
    write("self_play", [row], chosen.results)


if __name__ == "__main__":
    main()
