"""The same algorithm in one process, synchronous: act, learn, act. A control for what the queue costs.

    python -m benchmarks.ours.control '{"spec": {...}, "words": [], "seed": 0, "num_envs": 8, "steps": 1000000, ...}'

Has our environments, policy in NumPy, loss and optimizer; neither a gateway nor a queue, nor weights that lag behind.
Says the curve, as `benchmarks.ours.run` does, at `points` evenly spaced numbers of steps, or what there is of it after
`timeout_s`.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from typing import Any

import numpy as np
import torch

from benchmarks.talk import say
from shoal.actor.agent_streams import AgentStream, BatchGame
from shoal.actor.environment import make_environment
from shoal.actor.policy import make_policy
from shoal.rl.algorithms.algorithm import make_algorithm
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.learner import model_arrays
from shoal.rl.spec import RLSpec, experience_spec
from shoal.wire import ExperienceSpec, Segment

WINDOW = 100  # episodes of the mean return


class Player:
    """Plays `num_envs` environments with one policy, as an actor does, and keeps the segments."""

    def __init__(self, spec: RLSpec, experience: ExperienceSpec, num_envs: int) -> None:
        self._experience, self._num_streams = experience, 0
        self.segments: list[Segment] = []
        self.policy = make_policy(experience.policy, spec.learner.seed, "actor-0", experience.action.shape)
        environments = [make_environment(spec.env) for _ in range(num_envs)]
        self._game = BatchGame(environments, self, experience)
        self._game.reset([spec.learner.seed * num_envs + index for index in range(num_envs)])

    def make_stream(self) -> AgentStream:
        self._num_streams += 1
        return AgentStream(self._num_streams - 1, self._experience, self.policy)

    def send(self, stream: AgentStream, segment: Segment) -> None:
        self.segments.append(segment)

    def collect(self, num_steps: int) -> list[Segment]:
        """Complete segments with at least so many steps."""
        self.segments, game = [], self._game
        while sum(segment.num_steps for segment in self.segments) < num_steps:
            game.step(*self.policy.act_batch(game.observations, game.numbers, game.masks), self.policy.version)
        return self.segments


def main(setting: dict[str, Any]) -> None:
    spec = RLSpec.parse(setting["spec"]).override([*setting["words"], f"learner.seed={setting['seed']}"])
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(spec.learner.seed)
    environment = make_environment(spec.env)
    experience = experience_spec(environment.observation_space, environment.action_space, spec)
    algorithm = make_algorithm(spec, experience)
    player = Player(spec, experience, setting["num_envs"])
    batch_steps, _ = spec.batch_limits
    returns: deque[float] = deque(maxlen=WINDOW)
    points: list[tuple[float, int, float]] = []
    num_steps, version, began_s = 0, 0, time.monotonic()
    while True:
        version += 1
        player.policy.load(version, model_arrays(algorithm.model))
        segments = player.collect(batch_steps)
        num_steps += sum(segment.num_steps for segment in segments)
        returns += [segment.episode_return for segment in segments if segment.episode_return is not None]
        for _ in algorithm.update(ExperienceBatch.from_segments(version, segments)):
            pass
        seconds = time.monotonic() - began_s
        is_over = num_steps >= setting["steps"] or seconds > setting["timeout_s"]
        if is_over or (returns and num_steps >= setting["steps"] * (len(points) + 1) / setting["points"]):
            points.append((round(seconds, 2), num_steps, round(float(np.mean(returns)), 3)))
        if is_over:
            say(points=points)
            return


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
