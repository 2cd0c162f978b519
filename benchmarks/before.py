"""What must not have become dearer, beside an earlier commit: CartPole, a segment's cost, sensors, a DDP step.

    python -m benchmarks.before [--before REVISION] [--runs N] [--quick] [--only cartpole segment sensors step
                                 t_maze masked catch]

Each tree runs its own benchmark, in its own checkout, with the same Python; the trees take turns, process after
process. `benchmarks.serving.before` measures small requests in the same way.

*cartpole*: the processor time of a step until CartPole-v1 is solved, of gateway and learner in one process and of the
actors, the same seeds and settings on both sides; the seconds until then vary by a third from run to run, with the
number of steps. *segment*: what gateway and learner take of a processor for a step of experience, four actors
(`benchmarks.experience`). *sensors*: the 99th percentile of an answer's latency, 1,000 sensors at 1 Hz
(`benchmarks.stream`). *step*: a step of DDP over two ranks over the same step by hand (`benchmarks.training_step`).
*t_maze*, *masked*, *catch*: the environment steps until a game of memory, one with allowed actions and one of pictures
are solved with the defaults, four actors (`benchmarks.ours.small_games`).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.children import OUR_PYTHON, ROOT, scratch
from benchmarks.result import compare, options, write

BEFORE = "609ce98a"
BAR = 1.03
TIMEOUT_S = 600.0
CODE = """
import json, sys
from benchmarks.children import scratch
run, quick = int(sys.argv[1]), sys.argv[2] == "True"
with scratch() as folder:
    {body}
print("said", json.dumps(value))
"""
GAMES = ROOT / "benchmarks" / "ours" / "small_games.py"
GAME = """from benchmarks.ours.rl import actors_of, run_of
    env = "{env}"
    words = ["env=" + env, "algorithm=ppo", f"learner.seed={{run}}", {words}]
    with (
        run_of("local", folder, words=words, target_return={target}) as (learner, address),
        actors_of(folder, 4, ["--connect", address, "--env", env]),
    ):
        value = learner.ask({cap_s} + 30.0, do="solved", timeout_s={cap_s})["steps"]"""
# The row's name, its unit, and how a tree finds the value.
PROBES = {
    "cartpole": (
        "CartPole-v1 until it is solved, without Ray",
        "core-µs a step",
        """from benchmarks.ours.rl import actors_of, run_of
    from benchmarks.time_to_solve import NUM_ACTORS, TARGET
    words = ["algorithm=ppo", "algorithm.synchronous=true", "algorithm.discount=0.98", "algorithm.lambda_=0.9"]
    words += ["algorithm.epochs=8", "algorithm.learning_rate=0.002", "algorithm.entropy_cost=0"]
    words += ["learner.batch_steps=2048", "learner.max_batch_steps=2048", f"learner.seed={run}"]
    with (
        run_of("local", folder, words=words, target_return=TARGET) as (learner, address),
        actors_of(folder, NUM_ACTORS, ["--connect", address]) as actors,
    ):
        used_s = -sum(each.cpu_s() for each in (learner, *actors))
        solved = learner.ask(120.0, do="solved", timeout_s=90.0)
        used_s += sum(each.cpu_s() for each in (learner, *actors))
    value = 1e6 * used_s / solved["steps"]""",
    ),
    "segment": (
        "a step of experience, gateway and learner",
        "µs",
        """from benchmarks.experience import GAMES, measure_side
    window = measure_side(GAMES["CartPole-v1"], "local", folder, 3.0, 3.0 if quick else 10.0)
    value = 1e6 * window.run_cores / window.steps_per_s""",
    ),
    "sensors": (
        "1,000 sensors at 1 Hz: answer, p99",
        "ms",
        """from benchmarks.stream import measure_latency
    value = measure_latency(10.0 if quick else 40.0, folder)["p99"]""",
    ),
    "t_maze": (
        "T-maze of length 10 with a GRU until it returns 3.5 of 4",
        "steps",
        GAME.format(env=f"{GAMES}:t_maze", words='"core=gru"', target=3.5, cap_s=180),
    ),
    "masked": (
        "two numbers of an action, some not allowed, until 6 of 8 are right",
        "steps",
        GAME.format(env=f"{GAMES}:masked", words="", target=6.0, cap_s=120),
    ),
    "catch": (
        "Catch in pictures of 40 by 40 until it returns 0.8",
        "steps",
        GAME.format(env=f"{GAMES}:catch", words="", target=0.8, cap_s=240),
    ),
    "step": (
        "step time, DDP, 2 workers, perceptron, over the step by hand",
        "",
        """from benchmarks.training_step import measure
    ours, peer, *_ = measure("mlp", 2, 3 if quick else 12, folder)
    value = ours / peer""",
    ),
}


@contextmanager
def checkout(revision: str, folder: Path) -> Iterator[Path]:
    """The package at `revision`, for the length of a `with`."""
    tree = folder / "before"
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
    try:
        yield tree / "platform"
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def measure(tree: Path, probe: str, run: int, quick: bool) -> float:
    """What the benchmark of this tree finds."""
    words = [OUR_PYTHON, "-c", CODE.format(body=PROBES[probe][2]), str(run), str(quick)]
    path = os.pathsep.join(map(str, (tree / "platform", tree)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    ran = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    if ran.returncode:
        raise RuntimeError(f"{probe} of {tree} failed: {ran.stderr[-2000:]}")
    return float(json.loads(ran.stdout.rpartition("said ")[2]))


def main() -> None:
    chosen = options(__doc__, runs=11, only=tuple(PROBES), before=BEFORE)
    rows = []
    with scratch() as folder, checkout(chosen.before, folder) as package:
        for probe in chosen.only:
            name, unit, _ = PROBES[probe]
            ours, before = [], []
            for run in range(chosen.runs):
                sides = [(ours, ROOT), (before, package.parent)]
                for values, tree in sides if run % 2 else reversed(sides):
                    values.append(measure(tree, probe, run, chosen.quick))
                print(f"{probe}: {ours[-1]:.4g}, before {before[-1]:.4g}", flush=True)
            rows.append(compare(name, unit, "lower", ours, before, f"before ({chosen.before})", BAR, "ratio"))
    write("before", rows, chosen.results)


if __name__ == "__main__":
    main()
