"""A sweep from the command to the last result: `shoal sweep` beside Ray Tune's own loop around the same function.

    python -m benchmarks.sweep [--runs N] [--quick]

Twenty trials of LeNet on Fashion-MNIST, 500 steps each with five evaluations, the same learning rates on both sides,
each side with a Ray of its own that it starts. Ours: `shoal sweep` as typed, with everything that it does besides:
words, plan and data checked first, a run record of the sweep and of each trial. The peer: `Tuner.fit` around a function
that calls our Trainer and reports each evaluation, in a program of its own, as its documentation shows it. Time ends
for us when the record has the last trial's end, for the peer when `fit` returns.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks.children import OUR_PYTHON, ROOT, scratch
from benchmarks.result import compare, options, write
from shoal.search.space import SearchSpace

BAR, TIMEOUT_S = 1.05, 1800.0
SHOAL = [OUR_PYTHON, "-c", "from shoal.cli import main; main()"]
SPACE, SEED = "log(1e-4,1e-1)", 0


def trial_words(num_steps: int) -> list[str]:
    return [f"stop.steps={num_steps}", f"evaluate.every_steps={num_steps // 5}", "threads=1", "checkpoint.every_s=.inf"]


def ours(num_trials: int, num_steps: int, folder: Path) -> tuple[float, float, float]:
    """Seconds to the last trial's end and to the end of the command, and the best accuracy."""
    words = ["sweep", "lenet", f"optimizer.learning_rate={SPACE}", *trial_words(num_steps)]
    words += ["--trials", str(num_trials), "--seed", str(SEED), "--address", "local", "--plain"]
    environment = {**os.environ, "SHOAL_HOME": str(folder)}
    began_s = time.time()
    done = subprocess.run(
        [*SHOAL, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    took_s = time.time() - began_s
    found = re.search(r"^run (\S+):", done.stdout, re.MULTILINE)
    if done.returncode or found is None:
        raise RuntimeError(f"shoal sweep failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    with closing(sqlite3.connect(folder / "runs.sqlite")) as connection:
        rows = connection.execute(
            "SELECT time, details FROM events JOIN runs ON runs.number = events.run"
            " WHERE runs.id = ? AND events.kind = 'trial_ended'",
            (found[1],),
        ).fetchall()
    scores = [json.loads(details)["values"]["accuracy"] for _, details in rows]
    assert len(scores) == num_trials, scores
    return max(at for at, _ in rows) - began_s, took_s, max(scores)


def peer(num_trials: int, num_steps: int, folder: Path) -> tuple[float, float, float]:
    """The same of Ray Tune."""
    space = SearchSpace.parse({"rate": SPACE})
    rates = [space.sample(np.random.default_rng([SEED, number]))["rate"] for number in range(num_trials)]
    words = ["task=lenet", "stop.target=null", *trial_words(num_steps)]
    began_s = time.time()
    done = subprocess.run(
        [OUR_PYTHON, "benchmarks/peers/tune_sweep.py", str(folder), json.dumps({"words": words, "rates": rates})],
        cwd=ROOT, env={**os.environ, "SHOAL_HOME": str(folder)}, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    took_s = time.time() - began_s
    if done.returncode:
        raise RuntimeError(f"the peer failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert (said["trials"], said["errors"]) == (num_trials, 0), said
    return said["ended_s"] - began_s, took_s, said["best"]


def main() -> None:
    chosen = options(__doc__, runs=5)
    num_trials, num_steps = (4, 50) if chosen.quick else (20, 500)
    sides = {"ours": ours, "peer": peer}
    found: dict[str, list[tuple[float, float, float]]] = {"ours": [], "peer": []}
    for run in range(chosen.runs):
        for side in ("ours", "peer") if run % 2 else ("peer", "ours"):
            with scratch() as folder:
                found[side].append(sides[side](num_trials, num_steps, folder))
            print(side, found[side][-1], flush=True)
    last, whole, best = ([[each[index] for each in found[side]] for side in ("ours", "peer")] for index in range(3))
    name = f"{num_trials} trials of LeNet, {num_steps} steps each"
    note = f"best accuracy {np.median(best[0]):.4f} beside {np.median(best[1]):.4f}"
    rows = [
        compare(f"{name}: command to last result", "s", "lower", *last, "Ray Tune around the same function", BAR,
                "ratio", note),
        compare(f"{name}: the whole command", "s", "lower", *whole, "Ray Tune around the same function"),
    ]  # fmt: skip
    write("sweep", rows, chosen.results)


if __name__ == "__main__":
    main()
