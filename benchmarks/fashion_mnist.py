"""Fashion-MNIST to 90% test accuracy, timed from the first step; and what the one-cycle schedule is worth.

    python -m benchmarks.fashion_mnist [--runs N] [--quick]

The recipe jobs/lenet.py, whose images lie channels last. Ours: two workers of one thread each, under torchrun. Peers: a
plain loop with the same batch, optimiser and schedule on one thread, and on two; and, for what of it two workers are
worth and what the order in memory, on one thread with images channels last. Seconds of training steps only. Steps to
90% with the one-cycle schedule beside a constant rate (2e-3, at most eight epochs), for each of five seeds.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.ours.fashion import FOLDER
from benchmarks.result import Row, compare, options, write

SIDES = {
    "ours": ("trainer", 2, 1),
    "one core": ("plain", 1, 1),
    "two threads": ("plain", 1, 2),
    "one core, channels last": ("channels_last", 1, 1),
}
BARS = {"one core": 1.7, "two threads": 1.0, "one core, channels last": None}
CONSTANT = ["schedule.name=constant", "schedule.warmup=0", "optimizer.learning_rate=0.002", "stop.epochs=8"]


def train(side: str, processes: int, threads: int, seed: int, folder: Path, words: list[str]) -> dict[str, Any]:
    """One training to the target."""
    group = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    program = [*group, "-m", "benchmarks.ours.fashion", side, str(seed), str(threads), *words]
    with Child([OUR_PYTHON, *program], folder, {"OMP_NUM_THREADS": str(threads)}, goodbye_s=20.0) as child:
        return child.answer(400.0)


def speed_rows(found: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Ours beside each peer; as a speed, so that more is better."""
    rows = []
    for peer, bar in BARS.items():
        mine, theirs = ([60.0 / one["seconds"] for one in found[side]] for side in ("ours", peer))
        met = {side: sum(one["met"] for one in found[side]) for side in ("ours", peer)}
        steps = {side: statistics.median(one["ms_a_step"] for one in found[side]) for side in ("ours", peer)}
        note = (
            f"{met['ours']} and {met[peer]} of {len(mine)} runs reached 90%;"
            f" a step takes {steps['ours']:.1f} ms beside {steps[peer]:.1f} ms ({steps[peer] / steps['ours']:.2f}x)"
        )
        name = "Fashion-MNIST to 90%, 2 workers of one core"
        rows.append(compare(name, "trainings/min", "higher", mine, theirs, f"plain loop, {peer}", bar, "ratio", note))
    return rows


def schedule_row(folder: Path, seeds: range) -> Row:
    """Steps to 90% with one cycle, and with a constant rate."""
    cycle = [train("trainer", 1, 1, seed, folder, []) for seed in seeds]
    constant = [train("trainer", 1, 1, seed, folder, CONSTANT) for seed in seeds]
    reached = f"{sum(one['met'] for one in cycle)} and {sum(one['met'] for one in constant)} of {len(seeds)} seeds"
    note = f"{reached} reached 90% at all, the others count with their last step"
    steps = [[one["steps"] for one in side] for side in (cycle, constant)]
    return compare("steps to 90%, one-cycle schedule", "steps", "lower", *steps, "constant rate", note=note)


def main() -> None:
    chosen = options(__doc__, runs=5)
    if not FOLDER.is_dir():
        sys.exit("needs Fashion-MNIST: apt-get install dataset-fashion-mnist")
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with scratch() as folder:
        for seed in range(chosen.runs):
            for side, (program, processes, threads) in SIDES.items():
                words = ["parallel=ddp"] if processes > 1 else []
                found[side].append(train(program, processes, threads, seed, folder, words))
        rows = speed_rows(found)
        rows.append(schedule_row(folder, range(1 if chosen.quick else 5)))
    write("fashion_mnist", rows, chosen.results)


if __name__ == "__main__":
    main()
