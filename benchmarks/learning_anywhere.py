"""Environment steps until the same defaults have solved a task in other circumstances, as a ratio to four actors.

    python -m benchmarks.learning_anywhere [--runs N] [--quick] [--only TASK ...] [--resume] [--sides ours]

PPO and IMPALA on CartPole-v1 to 475 and FrozenLake-v1 to 0.7, without Ray, solved as in `benchmarks.algorithms`. The
circumstances: 1 or 16 actors in place of 4; a learner of a quarter of the speed, which sleeps after each batch for
three times as long as it took; experience 20 versions old, from a queue of twenty batches that stays full because the
learner sleeps 0.2 s after each; rewards times 0.001 and 1000, with the target scaled likewise. The limit
`gateway.max_version_lag` stays at its default, which is above 20: nothing is dropped for its age.

An attempt that has not solved it within the cap counts with the cap, and the note says so. Outcomes are appended to
attempts.jsonl beside the results: --resume repeats none that is there, and takes what `benchmarks.algorithms` measured.
"""

from __future__ import annotations

import statistics
from functools import partial

from benchmarks.algorithms import QUICK_CAPS, TASKS, Task
from benchmarks.attempts import Attempts, Caps, Ours, count_ours, solve
from benchmarks.children import scratch
from benchmarks.result import Row, compare, options, write
from benchmarks.time_to_solve import Solved, note_unsolved

BAR = 1.3
LAG, LAG_PAUSE_S = 20, 0.2
SLOW_FACTOR = 3.0
SLOW_CAP_FACTOR = 3  # of the task's seconds: some of these runs are slow
BASE = "4 actors"
GAMES = {"CartPole-v1": "cartpole", "FrozenLake-v1": "frozen_lake"}
MEASURED = ("ppo", "impala", "ppo_frozen_lake", "impala_frozen_lake")


def circumstances(task: Task) -> dict[str, Ours]:
    """Runs by title. Old experience on CartPole alone: elsewhere its pauses would take most of the time."""
    base, game = task.ours, GAMES[task.env]
    module = "benchmarks.ours.scaled_rewards"
    found = {
        BASE: base,
        "1 actor": base._replace(num_actors=1),
        "16 actors": base._replace(num_actors=16),
        "a quarter of the learner's speed": base._replace(pause_factor=SLOW_FACTOR),
    }
    if game == "cartpole":
        found[f"experience {LAG} versions old"] = base._replace(batches_ahead=LAG, pause_s=LAG_PAUSE_S)
    for name, factor in (("thousandth", 0.001), ("thousandfold", 1000.0)):
        scaled = base._replace(env=f"{module}:{game}_{name}", target=factor * task.target)
        found[f"rewards times {factor:g}"] = scaled
    return found


def row_of(task: Task, title: str, found: list[Solved], base: list[Solved]) -> Row:
    """Environment steps, beside those with four actors; the note has the age of experience."""
    lag = statistics.median(one.lag for one in found)
    note = "; ".join(filter(None, (note_unsolved("Shoal", found), f"experience {lag:.1f} versions old in the mean")))
    steps = [float(one.steps) for one in found]
    name = f"{task.algorithm.upper()}: {task.env} at {task.target:g}, {title}"
    if title == BASE:
        return compare(name, "steps", "lower", steps, note=note)
    return compare(name, "steps", "lower", steps, [float(one.steps) for one in base], BASE, BAR, "ratio", note)


def main() -> None:
    chosen = options(__doc__, runs=5, only=MEASURED, sides=("ours",))
    chosen.results.mkdir(parents=True, exist_ok=True)
    attempts = Attempts(chosen.results, chosen.sides, chosen.resume)
    rows = []
    with scratch() as folder:
        for name in chosen.only:
            task = TASKS[name]
            caps = QUICK_CAPS if chosen.quick else Caps(SLOW_CAP_FACTOR * task.caps.seconds, task.caps.steps)
            found: dict[str, list[Solved]] = {}
            for title, run in circumstances(task).items():
                what = f"{task.algorithm} {task.env}" + (f", {title}" if title != BASE else "")
                for seed in range(chosen.runs):
                    one = attempts.find(what, "ours", seed, run.settings, caps, partial(solve, run, seed, folder, caps))
                    found.setdefault(title, []).extend([one] if one else [])
                found[title] = count_ours(found[title], caps)
            rows += [row_of(task, title, each, found[BASE]) for title, each in found.items()]
    write("learning_anywhere", rows, chosen.results)


if __name__ == "__main__":
    main()
