"""What a step costs under the Trainer: beside bare DistributedDataParallel, and beside a loop written by hand.

    python -m benchmarks.training_step [--runs N] [--quick]

A perceptron (784-256-256-10) and LeNet, a global batch of 64, Adam, one thread each process. Trainer and peer take
turns of 40 steps within the same processes (`benchmarks.ours.steps`), so that both have the same cores, caches and
neighbours. The peer indexes a permutation of tensors in memory, which is the fastest that a loop by hand can do. Two
workers are also measured against their arithmetic alone: that loop on each rank's samples, without any exchange, on
both cores at the same time. It is the limit of what DDP can reach.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.result import Row, compare, options, write

SETTINGS = {
    ("mlp", 2): ("DDP, 2 workers, perceptron", "bare torchrun DDP", 0.4),
    ("lenet", 2): ("DDP, 2 workers, LeNet", "bare torchrun DDP", None),
    ("mlp", 1): ("one process, perceptron", "a loop by hand", 1.03),
    ("lenet", 1): ("one process, LeNet", "a loop by hand", 1.03),
}
# LeNet's arithmetic alone takes two thirds of torchrun's step: the bar is a share of that limit.
ALONE_BARS: dict[tuple[str, int], float | None] = {("mlp", 2): None, ("lenet", 2): 1.15}
SIDES = ("ours", "peer", "alone")


def measure(model: str, size: int, num_blocks: int, folder: Path) -> tuple[float, ...]:
    """Medians over the blocks of one group of processes: milliseconds of our step, the peer's, the arithmetic's."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)] if size > 1 else []
    words = [OUR_PYTHON, *torchrun, "-m", "benchmarks.ours.steps", model, str(num_blocks)]
    with Child(words, folder, {"OMP_NUM_THREADS": "1"}, goodbye_s=20.0) as child:
        said = child.answer(300.0)
    return tuple(1e3 * statistics.median(said[side]) for side in SIDES if side in said)


def make_row(title: str, ours: list[float], theirs: list[float], peer: str, bar: float | None) -> Row:
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    note = f"median of the ratios {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"
    return compare(title, "ms", "lower", ours, theirs, peer, bar, "ratio" if bar else None, note)


def main() -> None:
    chosen = options(__doc__, runs=7)
    num_blocks = 3 if chosen.quick else 16
    found: dict[tuple[str, int], list[tuple[float, ...]]] = {key: [] for key in SETTINGS}
    with scratch() as folder:
        for _ in range(chosen.runs):
            for key in SETTINGS:
                found[key].append(measure(*key, num_blocks, folder))
    rows: list[Row] = []
    for key, (name, peer, bar) in SETTINGS.items():
        ours, theirs, *alone = map(list, zip(*found[key], strict=True))
        rows.append(make_row(f"step time, {name}", ours, theirs, peer, bar))
        for each in alone:
            title = f"step time, {name}, over its arithmetic"
            rows.append(make_row(title, ours, each, "its steps without an exchange", ALONE_BARS[key]))
    write("training_step", rows, chosen.results)


if __name__ == "__main__":
    main()
