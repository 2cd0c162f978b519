"""What a step costs under the Trainer, beside the same step at an earlier commit.

    python -m benchmarks.step_before [--before REVISION] [--runs N] [--quick]

The setting of `benchmarks.training_step`, in one process: sums over ranks vary by more than what is looked for. Both
trees take turns, process after process. Within each process the Trainer takes turns with a loop written by hand, which
is the same for both trees: a number is the Trainer's step over that loop's, so that a machine whose speed drifts
cancels out.
"""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.children import OUR_PYTHON, ROOT, Child, scratch
from benchmarks.result import compare, options, write

BEFORE = "fbc799c2"  # the last one whose batches were weighted by their samples alone
SETTINGS = {"mlp": "perceptron", "lenet": "LeNet"}
BAR = 1.01


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


def measure(package: Path, model: str, num_blocks: int, folder: Path) -> float:
    """The median step of this package's Trainer over the median step of the loop by hand."""
    words = [OUR_PYTHON, "-m", "benchmarks.ours.steps", model, str(num_blocks)]
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(package), str(ROOT)])}
    with Child(words, folder, env, goodbye_s=20.0) as child:
        said = child.answer(300.0)
    return statistics.median(said["ours"]) / statistics.median(said["peer"])


def main() -> None:
    chosen = options(__doc__, runs=11, before=BEFORE)
    num_blocks = 3 if chosen.quick else 16
    rows = []
    with scratch() as folder, checkout(chosen.before, folder) as before:
        for model, name in SETTINGS.items():
            ours, theirs = [], []
            for run in range(chosen.runs):
                trees = [(ours, ROOT / "platform"), (theirs, before)]
                for values, package in trees if run % 2 else reversed(trees):
                    values.append(measure(package, model, num_blocks, folder))
            note = f"steps of the loop by hand; before is {chosen.before}"
            rows.append(
                compare(f"step time beside before, {name}", "", "lower", ours, theirs, "before", BAR, "ratio", note)
            )
    write("step_before", rows, chosen.results)


if __name__ == "__main__":
    main()
