"""Environment steps and seconds until each algorithm has solved a small task, beside stable-baselines3's of the name.

    python -m benchmarks.algorithms [--runs N] [--quick] [--only TASK ...] [--resume] [--sides ours sb3]

Solved: the mean return of the last 100 finished training episodes, exploration included, is at least the task's target.
The clock runs from the first step (ours: from the first segment that the gateway receives) and leaves out every
start-up. Ours has the defaults of the spec in every task: only `env` and `algorithm` are given. It is without Ray:
gateway and learner in one process, actors in processes of their own. Peers have the settings of RL Baselines3 Zoo for
this environment (FrozenLake-v1: the library's own defaults), one thread of torch, and learn on where their schedule
ends. IMPALA, which stable-baselines3 does not have, stands beside its PPO.

An attempt ends at a cap in steps or in seconds. One of ours that has not solved it by then counts with both caps, a
peer's with what it took, and the note says so. Each outcome is appended to attempts.jsonl beside the results: --resume
repeats none that is there for the same settings, and --sides ours takes the peer's from there. Each TASK has a file of
its own in benchmarks/results, so tasks can be measured one by one, and a picture, docs/pictures/curve_TASK.png.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.attempts import SIDES, Attempts, Caps, Ours, count_ours, solve
from benchmarks.children import PEERS_PYTHON, ROOT, Child, scratch
from benchmarks.peers.sb3_settings import SETTINGS
from benchmarks.result import RESULTS, Row, compare, options, write
from benchmarks.time_to_solve import START_TIMEOUT_S, Solved, note_unsolved, read_outcome

QUICK_CAPS = Caps(30.0, 10_000)
PICTURES = ROOT / "docs" / "pictures"


class Task(NamedTuple):
    """An algorithm on an environment; `peer` is one of stable-baselines3, or "". Bars are for ratios."""

    algorithm: str
    env: str
    target: float
    num_actors: int
    caps: Caps
    peer: str = ""
    steps_bar: float | None = None
    seconds_bar: float | None = None

    @property
    def ours(self) -> Ours:
        return Ours(self.algorithm, self.env, self.target, self.num_actors)


# Of steps, some four times as many as are typical.
CARTPOLE = ("CartPole-v1", 475.0, 4)
FROZEN_LAKE = ("FrozenLake-v1", 0.7, 4)
ACROBOT = ("Acrobot-v1", -100.0, 4)
LUNAR_LANDER = ("LunarLander-v3", 200.0, 4)
ON_POLICY = {
    "": (*CARTPOLE, Caps(180.0, 300_000)),
    "_frozen_lake": (*FROZEN_LAKE, Caps(600.0, 400_000)),
    "_acrobot": (*ACROBOT, Caps(600.0, 600_000)),
    "_lunar_lander": (*LUNAR_LANDER, Caps(2400.0, 2_000_000)),
}
TASKS = {
    **{f"ppo{ending}": Task("ppo", *task, "ppo", 1.2) for ending, task in ON_POLICY.items()},
    **{f"impala{ending}": Task("impala", *task, "ppo", 2.0) for ending, task in ON_POLICY.items()},
    "ppo": Task("ppo", *ON_POLICY[""], "ppo", 1.2, 0.25),
    "sac": Task("sac", "Pendulum-v1", -200.0, 2, Caps(900.0, 100_000), "sac", 1.2),
    "sac_mountain_car": Task("sac", "MountainCarContinuous-v0", 90.0, 2, Caps(3000.0, 200_000), "sac", 1.2),
    "dqn": Task("dqn", *CARTPOLE, Caps(180.0, 600_000), "dqn"),
    "r2d2": Task("r2d2", *CARTPOLE, Caps(300.0, 4_000_000)),
}


def sb3(task: Task, seed: int, folder: Path, caps: Caps) -> Solved:
    setting = {"algorithm": task.peer, "env": task.env, "seed": seed, "target": task.target}
    setting |= {"cap_s": caps.seconds, "max_steps": caps.steps, "torch_threads": 1}
    words = [PEERS_PYTHON, "-m", "benchmarks.peers.sb3", json.dumps(setting)]
    with Child(words, folder) as child:
        said = child.answer(START_TIMEOUT_S + caps.seconds)
        return read_outcome(said, float(said["seconds"]))


def settings_of_sb3(task: Task) -> dict[str, Any]:
    return {"target": task.target, "torch_threads": 1, **SETTINGS[task.peer, task.env]}


def rows_of(task: Task, caps: Caps, found: list[Solved], theirs: list[Solved]) -> list[Row]:
    """Environment steps of all actors together, seconds, and seeds that do not solve it."""
    found = count_ours(found, caps)
    peer = f"stable-baselines3 {task.peer.upper()}" if theirs else None
    title = f"{task.algorithm.upper()}: {task.env} at {task.target:g}"
    notes = [note_unsolved("Shoal", found), note_unsolved(peer or "", theirs)]
    note = "; ".join(filter(None, notes))
    unsolved = float(sum(not one.solved for one in found))
    steps_bar, seconds_bar = (bar if theirs else None for bar in (task.steps_bar, task.seconds_bar))
    return [
        compare(
            f"{title}, environment steps", "steps", "lower", [float(one.steps) for one in found],
            [float(one.steps) for one in theirs], peer, steps_bar, "ratio" if steps_bar else None, note,
        ),
        compare(
            title, "s", "lower", [one.seconds for one in found], [one.seconds for one in theirs], peer,
            seconds_bar, "ratio" if seconds_bar else None, note,
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
    axis.set_title(f"{task.algorithm.upper()} on {task.env}", fontsize=10)
    axis.set_xlabel("thousand environment steps")
    axis.set_ylabel("mean return of 100 episodes")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    chosen = options(__doc__, runs=5, only=tuple(TASKS), sides=SIDES)
    chosen.results.mkdir(parents=True, exist_ok=True)
    attempts = Attempts(chosen.results, chosen.sides, chosen.resume)
    with scratch() as folder:
        for name in chosen.only:
            task, found, theirs = TASKS[name], list[Solved](), list[Solved]()
            caps = QUICK_CAPS if chosen.quick else task.caps
            settings, of_peer = task.ours.settings, f"{task.peer} {task.env}"  # one peer for several tasks
            for seed in range(chosen.runs):
                measure = partial(solve, task.ours, seed, folder, caps)
                if one := attempts.find(f"{task.algorithm} {task.env}", "ours", seed, settings, caps, measure):
                    found.append(one)
                measure = partial(sb3, task, seed, folder, caps)
                if task.peer and (one := attempts.find(of_peer, "sb3", seed, settings_of_sb3(task), caps, measure)):
                    theirs.append(one)
            if found:
                write(f"algorithms_{name}", rows_of(task, caps, found, theirs), chosen.results)
                draw(task, found, (PICTURES if chosen.results == RESULTS else chosen.results) / f"curve_{name}.png")


if __name__ == "__main__":
    main()
