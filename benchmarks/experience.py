"""Environment steps a second of four actor processes that teach a learner, over what acting and learning alone allow.

    python -m benchmarks.experience [--runs N] [--quick]

One run is three windows of the same length, one after the other, each with four fresh processes: acting alone (the
policy and the environment of `shoal.actor`, and nothing else), with gateway and learner in one process without Ray
("local"), and with both as Ray workers ("ray"). CartPole is the cheapest environment there is: all is dear beside its
step. Acrobot's takes longer (four evaluations of its dynamics), and is still that of a toy; CartPole with other work
besides stands for a simulator. CartPole is played with the weights of `balancing`, so episodes last 500 steps in every
window: resets are as rare in one as in the other; Acrobot with those that a network begins with, under which they do
too. The learner works at full cost, with a learning rate that changes nothing. All share the machine's cores: what
gateway and learner take is lost to the actors. No platform can save the arithmetic of the updates, so a fourth window
measures it by itself, in a process that does nothing else: of A core-µs of acting and U of updates for a step, at most
A / (A + U) of the steps of acting alone are left, and the bar is a share of those.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.balancing import balancing_weights, first_weights, still
from benchmarks.children import Child, scratch
from benchmarks.ours.rl import actors_of, run_of
from benchmarks.result import compare, options, write
from shoal.actor.environment import make_environment
from shoal.rl.algorithms.algorithm import make_algorithm
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.spec import RLSpec, experience_spec
from shoal.weights import encode_tensors
from shoal.wire import Segment

NUM_ACTORS = 4
NUM_UPDATES, NUM_SEGMENTS = 50, 12  # of the learner by itself; segments in a batch, as it takes them with four actors
BAR = 0.8
SIDES = ("alone", "local", "ray")


class Game(NamedTuple):
    """An environment, whether there is a policy that balances in it, and how many numbers a step adds up besides."""

    env: str
    balancing: bool = False
    work: int = 0


GAMES = {
    "CartPole-v1": Game("CartPole-v1", balancing=True),
    "Acrobot-v1": Game("Acrobot-v1"),
    "a simulator": Game("CartPole-v1", balancing=True, work=6000),
}


class Window(NamedTuple):
    """Steps a second of all actors, and the cores that the actors and the run kept busy meanwhile."""

    steps_per_s: float
    actor_cores: float
    run_cores: float


def measure(actors: list[Child], run: Child | None, warm_up_s: float, window_s: float) -> Window:
    """One window of acting; the actors have begun already."""
    begin_s = time.monotonic() + warm_up_s
    for actor in actors:
        actor.tell(begin_s=begin_s, end_s=begin_s + window_s)
    time.sleep(warm_up_s)
    used_s = run.cpu_s() if run else 0.0
    counted = [actor.answer(warm_up_s + window_s + 30.0) for actor in actors]
    used_s = run.cpu_s() - used_s if run else 0.0
    rate = sum(one["steps"] / one["seconds"] for one in counted)
    return Window(rate, sum(one["cpu_s"] for one in counted) / window_s, used_s / window_s)


def measure_side(game: Game, side: str, folder: Path, warm_up_s: float, window_s: float) -> Window:
    """Start what the side needs for the game, measure, end it."""
    spec, words = RLSpec(env=game.env), ["--env", game.env, "--work", str(game.work)]
    if side == "alone":
        weights = folder / "weights.safetensors"
        weights.write_bytes(encode_tensors(balancing_weights(spec) if game.balancing else first_weights(spec)))
        with actors_of(folder, NUM_ACTORS, [*words, "--alone", str(weights)]) as actors:
            return measure(actors, None, warm_up_s, window_s)
    with (
        run_of(side, folder, spec={"env": game.env}, balancing=game.balancing, still=True) as (run, address),
        actors_of(folder, NUM_ACTORS, [*words, "--connect", address]) as actors,
    ):
        return measure(actors, run, warm_up_s, window_s)


def measure_updates(game: Game) -> float:
    """Core-µs of the updates, for a step of experience."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    spec, environment, random = still(RLSpec(env=game.env)), make_environment(game.env), np.random.default_rng(0)
    experience = experience_spec(environment.observation_space, environment.action_space, spec)
    algorithm, length = make_algorithm(spec, experience), spec.segment_length
    observations = np.array([environment.reset(seed=step)[0] for step in range(length + 1)])
    actions, ones = random.integers(0, environment.action_space.n, length), np.ones(length, np.float32)
    segment = Segment(observations, actions, ones, -ones, np.ones(length, np.int64))
    batch, used_s = ExperienceBatch.from_segments(1, [segment] * NUM_SEGMENTS), list[float]()
    for _ in range(NUM_UPDATES):
        begun_s = time.thread_time()
        list(algorithm.update(batch))
        used_s.append(time.thread_time() - begun_s)
    return 1e6 * median(used_s) / batch.num_steps


def main() -> None:
    chosen = options(__doc__, runs=4)
    warm_up_s, window_s = (2.0, 3.0) if chosen.quick else (3.0, 8.0)
    possible: dict[str, list[float]] = {name: [] for name in GAMES}  # steps/s of acting and learning alone
    update_us: dict[str, list[float]] = {name: [] for name in GAMES}
    found: dict[tuple[str, str], list[float]] = {(name, side): [] for name in GAMES for side in SIDES}
    step_us: dict[str, list[float]] = {name: [] for name in GAMES}
    with scratch() as folder:
        for index in range(chosen.runs):
            for name, side in found:
                window = measure_side(GAMES[name], side, folder, warm_up_s, window_s)
                found[name, side].append(window.steps_per_s)
                if side == "alone":
                    step_us[name].append(1e6 * window.actor_cores / window.steps_per_s)
                    update_us[name].append(measure_updates(GAMES[name]))
                    share = step_us[name][-1] / (step_us[name][-1] + update_us[name][-1])
                    possible[name].append(window.steps_per_s * share)
                print(
                    f"run {index + 1}, {name}, {side}: {window.steps_per_s:,.0f} steps/s; cores busy: actors"
                    f" {window.actor_cores:.2f}, gateway and learner {window.run_cores:.2f}",
                    flush=True,
                )
    rows = [
        compare(
            f"experience of {name} ({median(step_us[name]):.0f} µs a step) into the learner, four actors ({how})",
            "steps/s",
            "higher",
            found[name, side],
            possible[name],
            "acting and learning alone",
            bar=BAR,
            bar_kind="ratio",
            note="in brackets what acting and the environment take of a core, alone; the updates take"
            f" {median(update_us[name]):.1f} µs a step; acting alone: {median(found[name, 'alone']):,.0f} steps/s",
        )
        for name in GAMES
        for side, how in (("ray", "Ray"), ("local", "one process, no Ray"))
    ]
    write("experience", rows, chosen.results)


if __name__ == "__main__":
    main()
