"""LeNet on Fashion-MNIST to 87% by every way to keep two workers one model: seconds of training, and steps.

    python -m benchmarks.sync_accuracy [--runs N] [--quick]

Two worker processes, a global batch of 256, Adam 1e-3 without a schedule, an evaluation each quarter of an epoch; run N
has seed N. DDP runs under torchrun, the others start their processes themselves. The seconds are those of training,
without start and evaluations. A run that does not reach the target within four epochs counts with its end.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.children import OUR_PYTHON, Child, ChildFailed, scratch
from benchmarks.result import Row, compare, options, write

TARGET = 0.87
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SERVER = "sync.kind=parameter_server"
WAYS: dict[str, list[str]] = {
    "DDP": [],
    "parameter server, BSP": [SERVER, "sync.staleness=0"],
    "parameter server, SSP(4)": [SERVER, "sync.staleness=4"],
    "parameter server, free-running": [SERVER, "sync.staleness=null"],
    "local SGD, 8 steps": ["sync.kind=local_sgd", "sync.every=8"],
    "DiLoCo, 8 steps": ["sync.kind=diloco", "sync.every=8"],
}


def measure(way: str, seed: int, target: float) -> tuple[float, float, float]:
    """Seconds of training, steps, and the accuracy at the end."""
    words = ["-m", "shoal.train", "task=lenet", "workers=2", "threads=1", f"seed={seed}", *WAYS[way]]
    words += ["batch_size=256", "schedule.name=constant", "optimizer.learning_rate=0.001", "evaluate.every_epochs=0.25"]
    words += [f"stop.target=accuracy>={target}", "stop.epochs=4"]
    launcher = TORCHRUN if way == "DDP" else []
    with scratch() as folder:
        home = {"SHOAL_HOME": str(folder), "OMP_NUM_THREADS": "1"}
        with Child([OUR_PYTHON, *launcher, *words], folder, home, goodbye_s=20.0) as child:
            if child.wait(300.0):
                raise ChildFailed(f"{way}: {child.last_words()}")
        return _read_end(folder)


def _read_end(home: Path) -> tuple[float, float, float]:
    os.environ["SHOAL_HOME"] = str(home)
    import shoal.runs

    [run] = shoal.runs.list_runs()
    latest = run.latest()
    return latest["time/training_s"], run.last_events()["trained"]["steps"], latest["validation/accuracy"]


def main() -> None:
    chosen = options(__doc__, runs=3)
    target = 0.7 if chosen.quick else TARGET
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for seed in range(chosen.runs):
        for way in WAYS:
            found[way].append(measure(way, seed, target))
            print(way, seed, found[way][-1], flush=True)
    rows: list[Row] = []
    for way, ends in found.items():
        seconds, steps, accuracies = (list(values) for values in zip(*ends, strict=True))
        note = f"steps {', '.join(f'{each:,.0f}' for each in steps)}; accuracy at least {min(accuracies):.3f}"
        peer = [end[0] for end in found["DDP"]]
        title = f"LeNet to {target:.0%}, two workers, {way}"
        if way == "DDP":
            rows.append(compare(title, "s", "lower", seconds, note=note))
        else:
            rows.append(compare(title, "s", "lower", seconds, peer, "DDP", note=note))
    write("sync_accuracy", rows, chosen.results)


if __name__ == "__main__":
    main()
