"""What a step costs under the Trainer: beside bare DistributedDataParallel, and beside a loop written by hand.

    python -m benchmarks.training_step [--runs N] [--quick]

A perceptron (784-256-256-10) and LeNet, a global batch of 64, Adam, one thread each process. Trainer and peer take
turns of 40 steps within the same processes (`benchmarks.ours.steps`), so that both have the same cores, caches and
neighbours. The peer indexes a permutation of tensors in memory, which is the fastest that a loop by hand can do.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.result import Row, compare, options, write

SETTINGS = {
    ("mlp", 2): ("DDP, 2 workers, perceptron", "bare torchrun DDP", 1.02),
    ("lenet", 2): ("DDP, 2 workers, LeNet", "bare torchrun DDP", 1.02),
    ("mlp", 1): ("one process, perceptron", "a loop by hand", 1.03),
    ("lenet", 1): ("one process, LeNet", "a loop by hand", 1.03),
}


def measure(model: str, size: int, num_blocks: int, folder: Path) -> tuple[float, float]:
    """Medians over the blocks of one group of processes: milliseconds of our step, and of the peer's."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)] if size > 1 else []
    words = [OUR_PYTHON, *torchrun, "-m", "benchmarks.ours.steps", model, str(num_blocks)]
    with Child(words, folder, {"OMP_NUM_THREADS": "1"}, goodbye_s=20.0) as child:
        said = child.answer(300.0)
    return 1e3 * statistics.median(said["ours"]), 1e3 * statistics.median(said["peer"])


def main() -> None:
    chosen = options(__doc__, runs=7)
    num_blocks = 3 if chosen.quick else 16
    found: dict[tuple[str, int], list[tuple[float, float]]] = {key: [] for key in SETTINGS}
    with scratch() as folder:
        for _ in range(chosen.runs):
            for key in SETTINGS:
                found[key].append(measure(*key, num_blocks, folder))
    rows: list[Row] = []
    for key, (name, peer, bar) in SETTINGS.items():
        ours, theirs = zip(*found[key], strict=True)
        ratios = [mine / other for mine, other in found[key]]
        note = f"median of the ratios {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"
        rows.append(compare(f"step time, {name}", "ms", "lower", ours, theirs, peer, bar, "ratio", note))
    write("training_step", rows, chosen.results)


if __name__ == "__main__":
    main()
