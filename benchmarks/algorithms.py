"""Seconds and environment steps until each algorithm has solved a small task, beside stable-baselines3's of the name.

    python -m benchmarks.algorithms [--runs N] [--quick] [--only TASK ...]

Solved: a mean return of the last 100 finished training episodes, exploration included, of at least 475 on CartPole-v1,
or -200 on Pendulum-v1. The clock runs from the first step (ours: from the first segment that the gateway receives) and
leaves out every start-up. Ours is without Ray: gateway and learner in one process, actors in processes of their own.
Peers have the settings of RL Baselines3 Zoo, one thread of torch, and learn on where their schedule ends. An attempt
that does not solve it in time counts with the cap, and the note says so. Each TASK has a file of its own in
benchmarks/results, so tasks can be measured one by one, and a picture, docs/pictures/curve_TASK.png.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from benchmarks.children import PEERS_PYTHON, ROOT, Child, scratch
from benchmarks.ours.rl import actors_of, run_of
from benchmarks.result import RESULTS, Row, compare, options, write
from benchmarks.time_to_solve import START_TIMEOUT_S, WORDS, Solved, note_unsolved, read_outcome

QUICK_CAP_S = 30.0
PICTURES = ROOT / "docs" / "pictures"


class Task(NamedTuple):
    """An algorithm on an environment; `words` change our spec, `peer` is one of stable-baselines3, or ""."""

    algorithm: str
    env: str
    target: float
    cap_s: float
    num_actors: int
    words: tuple[str, ...]
    peer: str = ""


FRESH = ("segment_length=32", "gateway.queue_capacity=4", "gateway.max_credits=1")
SYNCHRONOUS = ("algorithm=ppo", "algorithm.synchronous=true")
PENDULUM = (
    *SYNCHRONOUS,
    *("algorithm.discount=0.9", "algorithm.entropy_cost=0", "algorithm.learning_rate=0.0005"),
    *("algorithm.epochs=10", "algorithm.minibatches=32"),
)
TASKS = {
    "impala": Task("IMPALA", "CartPole-v1", 475.0, 180.0, 4, ()),
    "ppo": Task("PPO", "CartPole-v1", 475.0, 180.0, 4, ("algorithm=ppo",), "ppo"),
    "ppo_synchronous": Task("PPO, synchronous", "CartPole-v1", 475.0, 180.0, 4, WORDS, "ppo"),
    "r2d2": Task("R2D2", "CartPole-v1", 475.0, 300.0, 4, ("algorithm=r2d2", "segment_length=64")),
    "dqn": Task("DQN", "CartPole-v1", 475.0, 180.0, 4, ("algorithm=dqn",), "dqn"),
    "sac": Task("SAC", "Pendulum-v1", -200.0, 600.0, 2, ("algorithm=sac", *FRESH), "sac"),
    "ppo_pendulum": Task("PPO, synchronous", "Pendulum-v1", -200.0, 600.0, 4, PENDULUM, "ppo"),
}


def ours(task: Task, seed: int, folder: Path, cap_s: float) -> Solved:
    """The gateway and the learner in one process."""
    words = [f"env={task.env}", *task.words, f"learner.seed={seed}"]
    with (
        run_of("local", folder, words=words, target_return=task.target) as (run, address),
        actors_of(folder, task.num_actors, ["--connect", address, "--env", task.env]),
    ):
        return read_outcome(run.ask(cap_s + 30.0, do="solved", timeout_s=cap_s), cap_s)


def sb3(task: Task, seed: int, folder: Path, cap_s: float) -> Solved:
    setting = {"algorithm": task.peer, "env": task.env, "seed": seed, "target": task.target, "cap_s": cap_s}
    words = [PEERS_PYTHON, "-m", "benchmarks.peers.sb3", json.dumps(setting | {"torch_threads": 1})]
    with Child(words, folder) as child:
        return read_outcome(child.answer(START_TIMEOUT_S + cap_s), cap_s)


def rows_of(task: Task, found: list[Solved], theirs: list[Solved]) -> list[Row]:
    """Seconds, and environment steps of all actors together. No bar but that all attempts solve it, in the note."""
    peer = f"stable-baselines3 {task.peer.upper()}" if theirs else None
    title = f"{task.algorithm}: {task.env} at {task.target:g}"
    notes = [note_unsolved("Shoal", found), note_unsolved(peer or "", theirs)]
    note = "; ".join(filter(None, notes))
    unsolved = float(sum(not one.solved for one in found))
    return [
        compare(title, "s", "lower", [one.seconds for one in found], [one.seconds for one in theirs], peer, note=note),
        compare(
            f"{title}, environment steps", "steps", "lower", [float(one.steps) for one in found],
            [float(one.steps) for one in theirs], peer, note=note,
        ),
        compare(f"{title}, seeds that do not", "seeds", "lower", [unsolved], bar=0.0, bar_kind="value"),
    ]  # fmt: skip


def draw(task: Task, found: list[Solved], path: Path) -> None:
    """Mean returns by environment steps, a line for each seed, and the target."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(4.6, 2.8), layout="constrained")
    for one in found:
        axis.plot([steps / 1000 for steps, _ in one.points], [mean for _, mean in one.points], "C0-", linewidth=1)
    axis.axhline(task.target, color="0.6", linestyle=":")
    axis.set_title(f"{task.algorithm} on {task.env}", fontsize=10)
    axis.set_xlabel("thousand environment steps")
    axis.set_ylabel("mean return of 100 episodes")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    chosen = options(__doc__, runs=5, only=tuple(TASKS))
    chosen.results.mkdir(parents=True, exist_ok=True)
    with scratch() as folder:
        for name in chosen.only:
            task, found, theirs = TASKS[name], list[Solved](), list[Solved]()
            cap_s = QUICK_CAP_S if chosen.quick else task.cap_s
            for seed in range(chosen.runs):
                found.append(ours(task, seed, folder, cap_s))
                print_outcome(f"{name}, seed {seed}, ours", found[-1])
                if task.peer:
                    theirs.append(sb3(task, seed, folder, cap_s))
                    print_outcome(f"{name}, seed {seed}, sb3", theirs[-1])
            write(f"algorithms_{name}", rows_of(task, found, theirs), chosen.results)
            draw(task, found, (PICTURES if chosen.results == RESULTS else chosen.results) / f"curve_{name}.png")


def print_outcome(what: str, outcome: Solved) -> None:
    verdict = "solved" if outcome.solved else "NOT solved"
    print(f"{what}: {verdict}, {outcome.seconds:.2f} s, {outcome.steps:,} steps", flush=True)


if __name__ == "__main__":
    main()
