"""Returns of IMPALA and PPO at the end of long training on experience of a steady age, in weight versions.

    python -m benchmarks.steady_lag [--runs N] [--quick] [--only ALGORITHM ...]

CartPole-v1 without Ray or sockets: one thread acts, queues each batch behind LAG others and learns from the oldest, so
each update sees experience that is exactly LAG versions old. 1,500 batches of 2,048 steps are what four actors play in
about 120 s. The endpoint's return is the mean of 100 held-out episodes with the final weights.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from shoal.actor.policy import Policy, make_policy
from shoal.rl.algorithms.algorithm import make_algorithm
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.learner import model_arrays
from shoal.rl.spec import RLSpec, experience_spec
from shoal.wire.segment import Segment

NUM_ENVS, NUM_STEPS = 8, 256


class Players:
    """Environments that step together, each with a stream of segments."""

    def __init__(self, env: str, seed: int) -> None:
        self.env = gymnasium.make_vec(env, num_envs=NUM_ENVS)
        if isinstance(self.env.single_observation_space, gymnasium.spaces.Discrete):
            self.env = gymnasium.wrappers.vector.FlattenObservation(self.env)
        self._observations, _ = self.env.reset(seed=seed)
        self._is_over = np.zeros(NUM_ENVS, bool)
        self._returns = np.zeros(NUM_ENVS)
        self.returns: deque[float] = deque(maxlen=100)

    def play(self, policy: Policy, version: int) -> ExperienceBatch:
        rows = [self._observations]
        steps: list[tuple[np.ndarray, ...]] = []
        for _ in range(NUM_STEPS):
            actions, log_probabilities = policy.act_batch(self._observations.astype(np.float32), range(NUM_ENVS))
            was_over = self._is_over
            actions = np.asarray(actions)
            self._observations, rewards, terminated, truncated, _ = self.env.step(actions)
            self._is_over = terminated | truncated
            self._returns += rewards
            for index in np.flatnonzero(self._is_over):
                self.returns.append(float(self._returns[index]))
                self._returns[index] = 0.0
            rows.append(self._observations)
            steps.append((actions, rewards, np.asarray(log_probabilities), terminated, truncated, was_over))
        grid = [np.stack(each) for each in zip(*steps, strict=True)]
        observations = np.stack(rows)
        return ExperienceBatch.from_segments(0, list(self._cut(observations, *grid, version)))

    def _cut(self, observations, actions, rewards, log_probabilities, terminated, truncated, was_over, version):
        for index in range(NUM_ENVS):
            ends = [*(np.flatnonzero((terminated | truncated)[:, index]) + 1), NUM_STEPS]
            begin = 0
            for end in ends:
                begin += bool(begin < NUM_STEPS and was_over[begin, index])  # the step that resets
                if begin < end:
                    part = slice(begin, end)
                    yield Segment(
                        observations[begin : end + 1, index],
                        actions[part, index],
                        rewards[part, index].astype(np.float32),
                        log_probabilities[part, index].astype(np.float32),
                        np.full(end - begin, version),
                        bool(terminated[end - 1, index]),
                        bool(truncated[end - 1, index]),
                        None,
                        None,
                        {},
                    )
                begin = end


def evaluate(env: str, policy: Policy, seed: int, episodes: int, greedy: bool) -> float:
    players = gymnasium.make_vec(env, num_envs=episodes)
    if isinstance(players.single_observation_space, gymnasium.spaces.Discrete):
        players = gymnasium.wrappers.vector.FlattenObservation(players)
    observations, _ = players.reset(seed=seed)
    playing, returns = np.ones(episodes, bool), np.zeros(episodes)
    while playing.any():
        rows = observations.astype(np.float32)
        actions = (
            policy.compute_outputs(rows).argmax(1) if greedy else np.asarray(policy.act_batch(rows, range(episodes))[0])
        )
        observations, rewards, terminated, truncated, _ = players.step(actions)
        returns += rewards * playing
        playing &= ~(terminated | truncated)
    return float(returns.mean())


def learn(env: str, words: list[str], lag: int, seed: int, num_batches: int, log_every: int = 50) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    torch.set_flush_denormal(True)
    spec = RLSpec(env=env).override([*words, f"learner.seed={seed}"])
    players = Players(env, 1000 * seed)
    experience = experience_spec(players.env.single_observation_space, players.env.single_action_space, spec)
    algorithm = make_algorithm(spec, experience)
    policy = make_policy(experience.policy, seed, action_shape=experience.action.shape)
    judge = make_policy(experience.policy, seed, action_shape=experience.action.shape)
    queue: deque[ExperienceBatch] = deque()
    curve, started = [], time.monotonic()
    sums: dict[str, float] = {}
    version = 1
    policy.load(version, model_arrays(algorithm.model))
    for number in range(1, num_batches + 1):
        queue.append(players.play(policy, version))
        if len(queue) <= lag:
            continue
        batch = algorithm.prepare(queue.popleft())
        for metrics in algorithm.update(batch):
            pass
        version += 1
        policy.load(version, algorithm.normalizer.fold(model_arrays(algorithm.model)))
        if number % log_every == 0 or number == num_batches:
            judge.load(version, algorithm.normalizer.fold(model_arrays(algorithm.model)))
            point = {
                "batch": number,
                "training": float(np.mean(players.returns)),
                "greedy": evaluate(env, judge, 10_000, 20, True),
                **{name.removeprefix("learner/"): round(value, 5) for name, value in metrics.items()},
            }
            curve.append(point)
            print(json.dumps(point), file=sys.stderr, flush=True)
    seconds = time.monotonic() - started
    return {
        "env": env,
        "words": words,
        "lag": lag,
        "seed": seed,
        "seconds": seconds,
        "greedy": evaluate(env, judge, 20_000, 100, True),
        "sampled": evaluate(env, judge, 20_000, 100, False),
        "training": curve[-1]["training"],
        "worst_after_solved": None,
        "curve": curve,
    }


if __name__ == "__main__":
    setting = json.loads(sys.argv[1])
    found = learn(**setting)
    with Path(sys.argv[2]).open("a") as file:
        file.write(json.dumps(found) + "\n")
    print({key: found[key] for key in ("words", "lag", "seed", "seconds", "greedy", "sampled", "training")})
