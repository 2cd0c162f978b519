"""Returns of IMPALA and PPO after long training on experience of a steady age, in weight versions.

    python -m benchmarks.steady_lag [--seeds N] [--quick] [--only ALGORITHM ...]

CartPole-v1 without Ray and sockets: one loop acts, queues each batch behind LAG others, and learns from the oldest, so
each update sees experience that is exactly LAG versions old. IMPALA learns from 2.0 million steps, PPO from 1.4. A
return is the mean of 100 held-out episodes with the final weights, by best actions or sampled: the lower one counts.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from benchmarks.children import OUR_PYTHON, ROOT, Child, scratch
from benchmarks.result import compare, options, write
from benchmarks.talk import say
from shoal.actor.policy import Policy, make_policy
from shoal.rl.algorithms.algorithm import Algorithm, make_algorithm
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.learner import model_arrays
from shoal.rl.spec import RLSpec, experience_spec
from shoal.wire import ExperienceSpec
from shoal.wire.segment import Segment

LAGS = (0, 10, 20, 30)
NUM_ENVS, NUM_STEPS, QUICK_BATCHES = 8, 256, 30
NUM_BATCHES = {"impala": 1000, "ppo": 700}
BAR, TIMEOUT_S = 450.0, 1800.0
KEPT = ROOT / "build" / "benchmarks" / "steady_lag.jsonl"  # a line for each seed: a benchmark that was cut off goes on
ALGORITHMS = {"impala": [], "ppo": ["algorithm=ppo"]}


class Players:
    """Environments that step together; `play` cuts what they did into segments."""

    def __init__(self, env: str, num_envs: int, seed: int) -> None:
        envs: Any = gymnasium.make_vec(env, num_envs=num_envs)
        is_discrete = isinstance(envs.single_observation_space, gymnasium.spaces.Discrete)
        self.envs = gymnasium.wrappers.vector.FlattenObservation(envs) if is_discrete else envs
        self._num_envs, (self._observations, _) = num_envs, self.envs.reset(seed=seed)
        self._is_over = np.zeros(num_envs, bool)  # the next step of those resets them

    def play(self, policy: Policy, version: int) -> ExperienceBatch:
        rows, steps = [self._observations], []
        for _ in range(NUM_STEPS):
            actions, log_probabilities = policy.act_batch(self._observations.astype(np.float32), range(self._num_envs))
            was_over = self._is_over
            self._observations, rewards, terminated, truncated, _ = self.envs.step(np.asarray(actions))
            self._is_over = terminated | truncated
            rows.append(self._observations)
            steps.append((np.asarray(actions), rewards, np.asarray(log_probabilities), terminated, truncated, was_over))
        grids = [np.stack(each) for each in zip(*steps, strict=True)]
        return ExperienceBatch.from_segments(0, list(self._cut(np.stack(rows), *grids, version=version)))

    def _cut(
        self,
        observations: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        log_probabilities: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        was_over: np.ndarray,
        version: int,
    ) -> Iterator[Segment]:
        for index in range(self._num_envs):
            begin = 0
            for end in (*(np.flatnonzero((terminated | truncated)[:, index]) + 1), NUM_STEPS):
                begin += bool(begin < end and was_over[begin, index])
                if begin < end:
                    at = slice(begin, end), index
                    versions, last = np.full(end - begin, version), (end - 1, index)
                    yield Segment(
                        observations[begin : end + 1, index], actions[at], rewards[at].astype(np.float32),
                        log_probabilities[at].astype(np.float32), versions, bool(terminated[last]),
                        bool(truncated[last]), None, None, {},
                    )  # fmt: skip
                begin = end


def evaluate(env: str, policy: Policy, is_sampled: bool, num_episodes: int = 100) -> float:
    """The mean return of held-out episodes."""
    players = Players(env, num_episodes, seed=20_000)
    observations, _ = players.envs.reset(seed=20_000)
    is_playing, returns = np.ones(num_episodes, bool), np.zeros(num_episodes)
    while is_playing.any():
        rows = observations.astype(np.float32)
        sampled = policy.act_batch(rows, range(num_episodes))[0] if is_sampled else ()
        actions = np.asarray(sampled) if is_sampled else policy.compute_outputs(rows).argmax(1)
        observations, rewards, terminated, truncated, _ = players.envs.step(actions)
        returns += rewards * is_playing
        is_playing &= ~(terminated | truncated)
    return float(returns.mean())


def train(
    env: str, words: list[str], lag: int, seed: int, num_batches: int
) -> tuple[RLSpec, ExperienceSpec, Algorithm, dict[str, float]]:
    """Learn from batches that are `lag` versions old; the last metrics."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    torch.set_flush_denormal(True)
    spec, players = RLSpec(env=env).override(words), Players(env, NUM_ENVS, 1000 * seed)
    experience = experience_spec(players.envs.single_observation_space, players.envs.single_action_space, spec)
    algorithm = make_algorithm(spec, experience)
    policy, queue, metrics = make_policy(experience.policy, seed), deque[ExperienceBatch](), dict[str, float]()
    policy.load(1, model_arrays(algorithm.model))
    for number in range(1, num_batches + 1):
        queue.append(players.play(policy, number))
        if len(queue) > lag:
            for step in algorithm.update(algorithm.prepare(queue.popleft())):
                metrics = {**step}
            policy.load(number + 1, model_arrays(algorithm.model))
    return spec, experience, algorithm, metrics


def learn(env: str, words: list[str], lag: int, seed: int, num_batches: int) -> dict[str, Any]:
    _, experience, algorithm, metrics = train(env, words, lag, seed, num_batches)
    policy = make_policy(experience.policy, seed)
    policy.load(1, model_arrays(algorithm.model))
    found = {"best": evaluate(env, policy, is_sampled=False), "sampled": evaluate(env, policy, is_sampled=True)}
    return {**found, "entropy": metrics["learner/entropy"]}


def measure(setting: list[Any], folder: Path) -> dict[str, float]:
    """What `learn` finds, in a process of its own; or has found, if KEPT has it."""
    kept = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    for each in kept:
        if each["setting"] == setting:
            return dict(each["found"])
    with Child([OUR_PYTHON, "-m", "benchmarks.steady_lag", json.dumps(setting)], folder) as child:
        found = child.answer(TIMEOUT_S)
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    with KEPT.open("a") as file:
        file.write(json.dumps({"setting": setting, "found": found}) + "\n")
    return found


def main() -> None:
    chosen = options(__doc__, runs=5, only=tuple(ALGORITHMS))
    rows = []
    with scratch() as folder:
        for algorithm in chosen.only:
            num_batches = QUICK_BATCHES if chosen.quick else NUM_BATCHES[algorithm]
            for lag in LAGS:
                settings = [
                    ["CartPole-v1", ALGORITHMS[algorithm], lag, seed, num_batches] for seed in range(chosen.runs)
                ]
                found = [measure(setting, folder) for setting in settings]
                print(f"{algorithm}, lag {lag}: {found}", flush=True)
                returns = [min(each["best"], each["sampled"]) for each in found]
                name = f"{algorithm.upper()}, experience {lag} versions old"
                note = f"the least of {len(found)} seeds {min(returns):.0f}"
                rows.append(compare(name, "return", "higher", returns, bar=BAR, bar_kind="value", note=note))
    write("steady_lag", rows, chosen.results)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        say(**learn(*json.loads(sys.argv[1])))
    else:
        main()
