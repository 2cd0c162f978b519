"""One external actor that counts its steps: the ready loop of `shoal.actor`, or acting alone, without a gateway.

    python -m benchmarks.ours.actor --connect tcp://127.0.0.1:5555 --seed 0
    python -m benchmarks.ours.actor --alone weights.safetensors --seed 0

Says `ready` at its first step, then for each `{"begin_s": ..., "end_s": ...}` (time.monotonic) how many steps it made
in between and with how much processor time; with --tell-weights, each version that it applied. Ends when its input
closes. Imports no torch, as a game client would not.
"""

from __future__ import annotations

import argparse
import os
import resource
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.talk import commands, say
from shoal.actor import ActorClient
from shoal.actor.environment import make_environment
from shoal.actor.environment_loop import play
from shoal.actor.policy import MlpPolicy
from shoal.weights import decode_tensors
from shoal.wire import PolicySpec


class Counted(Protocol):
    """What counts its steps."""

    @property
    def steps(self) -> int: ...


class Total:
    """The steps of several environments."""

    def __init__(self, environments: Sequence[CountedEnvironment]) -> None:
        self._environments = environments

    @property
    def steps(self) -> int:
        return sum(each.steps for each in self._environments)


class CountedEnvironment:
    """Passes on to an environment and counts its steps; `steps_per_s` paces it like a game, None does not.

    work: what a step computes besides, in numbers that are added up: a simulator that takes longer
    """

    def __init__(self, name: str, steps_per_s: float | None, work: int = 0) -> None:
        self._environment, self._work = make_environment(name), range(work)
        self._period_s = 1.0 / steps_per_s if steps_per_s else 0.0
        self._due_s = 0.0
        self.steps = 0

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        return self._environment.reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self._period_s:
            self._due_s = max(self._due_s + self._period_s, time.monotonic())
            time.sleep(self._due_s - time.monotonic() if self._due_s > time.monotonic() else 0.0)
        if self._work:
            sum(self._work)
        return self._environment.step(action)


def act_alone(environments: Sequence[CountedEnvironment], policy: MlpPolicy, seed: int) -> None:
    """The same acting as in `play`, and nothing besides: nothing is collected, sent or pulled."""
    numbers = range(len(environments))
    observations = [each.reset(seed=seed + index)[0] for index, each in enumerate(environments)]
    while True:
        actions, _ = policy.act_batch(observations, numbers)
        for index, (environment, action) in enumerate(zip(environments, actions, strict=True)):
            observations[index], _, terminated, truncated, _ = environment.step(action)
            if terminated or truncated:
                observations[index], _ = environment.reset()


def answer_questions(environment: Counted) -> None:
    """Runs in a thread beside the loop that acts; ends the process when the parent closes the pipe."""
    while environment.steps == 0:
        time.sleep(0.01)
    say(ready=True)
    for window in commands():
        begin = _reading(environment, window["begin_s"])
        end = _reading(environment, window["end_s"])
        steps, seconds, cpu_s = (after - before for before, after in zip(begin, end, strict=True))
        say(steps=steps, seconds=seconds, cpu_s=cpu_s)
    os._exit(0)


def _reading(environment: Counted, at_s: float) -> tuple[float, float, float]:
    time.sleep(max(0.0, at_s - time.monotonic()))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return environment.steps, time.monotonic(), usage.ru_utime + usage.ru_stime


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--connect", metavar="ADDRESS")
    where.add_argument("--alone", metavar="WEIGHTS", type=Path)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--envs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps-per-s", type=float, default=None)
    parser.add_argument("--work", type=int, default=0)
    parser.add_argument("--tell-weights", action="store_true")
    options = parser.parse_args(arguments)
    make = partial(CountedEnvironment, options.env, options.steps_per_s, options.work)
    environments = [make() for _ in range(options.envs)]
    threading.Thread(target=answer_questions, args=(Total(environments),), daemon=True).start()
    if options.alone:
        tensors = decode_tensors(options.alone.read_bytes())
        num_layers = sum(name.startswith("policy.") for name in tensors) // 2
        names = tuple((f"policy.{2 * index}.weight", f"policy.{2 * index}.bias") for index in range(num_layers))
        policy = MlpPolicy(PolicySpec("mlp_categorical", "tanh", names), options.seed)
        policy.load(1, tensors)
        act_alone(environments, policy, options.seed)
    client = ActorClient(options.connect, os.environ["SHOAL_TOKEN"], f"actor-{options.seed}")
    with client:
        tell = (lambda version: say(version=version, at_s=time.time())) if options.tell_weights else None
        play(environments, client, options.seed, on_weights=tell)


if __name__ == "__main__":
    main()
