"""LeNet on Fashion-MNIST to 87% by every way to keep two workers one model: seconds of training, and steps.

    python -m benchmarks.sync_accuracy [--runs N] [--quick]

Two worker processes, a global batch of 256, Adam 1e-3 without a schedule, an evaluation each quarter of an epoch; run N
has seed N. DDP runs under torchrun, the others start their processes themselves. The seconds are those of training,
without start and evaluations. A run that does not reach the target within four epochs counts with its end.

Writes the curves to docs/pictures/sync_accuracy.json, and the plot of docs/parallelism.md beside it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.children import OUR_PYTHON, ROOT, Child, ChildFailed, scratch
from benchmarks.result import Row, compare, options, write

TARGET = 0.87
CURVE = ["time/training_s", "validation/accuracy"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SERVER = "sync.kind=parameter_server"
WAYS: dict[str, list[str]] = {
    "DDP": [],
    "parameter server, BSP": [SERVER, "sync.staleness=0"],
    "parameter server, SSP(4)": [SERVER, "sync.staleness=4"],
    "parameter server, free-running": [SERVER, "sync.staleness=null"],
    "local SGD, 8 steps": ["sync.kind=local_sgd", "sync.every=8"],
    "DiLoCo, 8 steps": ["sync.kind=diloco", "sync.every=8"],
    "Hogwild, 2 lanes": ["workers=1", "sync.hogwild=2"],
}
PICTURE = ROOT / "docs/pictures/sync_accuracy.png"
# One hue for each family, and a line for each member.
STYLES = {
    "DDP": ("#1b6ca8", "-"),
    "parameter server, BSP": ("#2a9d5c", "-"),
    "parameter server, SSP(4)": ("#2a9d5c", "--"),
    "parameter server, free-running": ("#2a9d5c", ":"),
    "local SGD, 8 steps": ("#d98a00", "--"),
    "DiLoCo, 8 steps": ("#d98a00", "-"),
    "Hogwild, 2 lanes": ("#b3322f", "-"),
}


class Ended(NamedTuple):
    """curve: (seconds of training, accuracy) of each evaluation"""

    seconds: float
    steps: float
    accuracy: float
    curve: list[tuple[float, float]]


def measure(way: str, seed: int, target: float) -> Ended:
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


def _read_end(home: Path) -> Ended:
    os.environ["SHOAL_HOME"] = str(home)
    import shoal.runs

    [run] = shoal.runs.list_runs()
    latest, steps = run.latest(), run.last_events()["trained"]["steps"]
    rows = run.metrics()[CURVE].dropna()
    curve = [(float(seconds), float(accuracy)) for seconds, accuracy in rows.itertuples(index=False)]
    return Ended(latest["time/training_s"], steps, latest["validation/accuracy"], curve)


def draw(curves: dict[str, list[list[tuple[float, float]]]]) -> None:
    """Accuracy against seconds of training: the first seed's curve of each way."""
    figure, axes = plt.subplots(figsize=(8, 4.6))
    for way, runs in curves.items():
        colour, line = STYLES[way]
        axes.plot(*zip(*runs[0], strict=True), line, color=colour, label=way, linewidth=1.6)
    axes.axhline(TARGET, color="#999999", linewidth=0.8)
    axes.set(xlabel="seconds of training", ylabel="accuracy on the validation data", ylim=(0.6, 0.9), xlim=(0, None))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=150)


def main() -> None:
    chosen = options(__doc__, runs=3)
    target = 0.7 if chosen.quick else TARGET
    found: dict[str, list[Ended]] = {way: [] for way in WAYS}
    for seed in range(chosen.runs):
        for way in WAYS:
            found[way].append(measure(way, seed, target))
            print(way, seed, found[way][-1][:3], flush=True)
    rows: list[Row] = []
    for way, ends in found.items():
        seconds, steps, accuracies = ([end[field] for end in ends] for field in range(3))
        note = f"steps {', '.join(f'{each:,.0f}' for each in steps)}; accuracy at least {min(accuracies):.3f}"
        peer = [end.seconds for end in found["DDP"]]
        title = f"LeNet to {target:.0%}, two workers, {way}"
        if way == "DDP":
            rows.append(compare(title, "s", "lower", seconds, note=note))
        else:
            rows.append(compare(title, "s", "lower", seconds, peer, "DDP", note=note))
    write("sync_accuracy", rows, chosen.results)
    if not chosen.quick:
        curves = {way: [end.curve for end in ends] for way, ends in found.items()}
        PICTURE.with_suffix(".json").write_text(json.dumps(curves))
        draw(curves)


if __name__ == "__main__":
    main()
