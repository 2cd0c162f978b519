"""Input that is as slow as the step: samples per second with one worker process, beside a loop that reads in between.

    python -m benchmarks.input [--runs N] [--quick]

Images in an HDF5 file, compressed as such files are (gzip, a chunk each image). The step is a perceptron on one thread,
whose size is chosen so that it takes as long as reading its batch. Ours: the Trainer with `loader.workers=1`. The
peer: the same step and the same reads, one after the other, in a loop by hand. At best they overlap: a ratio of 2.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.children import OUR_PYTHON, ROOT
from benchmarks.result import compare, options, write
from benchmarks.talk import parse, say
from shoal.data import Data
from shoal.data.formats import Hdf5
from shoal.parallel import World
from shoal.train import Task, TrainSpec
from shoal.train.loop.trainer import Trainer

BATCH, IMAGES, SIDE = 64, 1024, 64
BAR = 1.8
PIXELS = 3 * SIDE * SIDE


def write_images(path: Path) -> None:
    """Images with structure, which compress to about a third."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 200, (IMAGES, 3, SIDE // 4, SIDE // 4), dtype=np.uint8)
    images = coarse.repeat(4, 2).repeat(4, 3) + random.integers(0, 8, (IMAGES, 3, SIDE, SIDE), dtype=np.uint8)
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images, chunks=(1, 3, SIDE, SIDE), compression="gzip", compression_opts=4)
        file.create_dataset("labels", data=random.integers(0, 10, IMAGES))


def model_of(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(PIXELS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


class Images(Task):
    """Classification of the images of a file."""

    def __init__(self, file: str, width: int) -> None:
        self.file, self.width = file, width

    def model(self) -> nn.Module:
        return model_of(self.width)

    def data(self) -> Data:
        return Data(Hdf5(self.file, {"images": "images", "labels": "labels"}))

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return (batch["images"].flatten(1).float() / 255,)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch["labels"])


class ByHand:
    """Read a batch, take a step; and how long each of the two takes."""

    def __init__(self, file: Path, width: int) -> None:
        self._file = h5py.File(file)
        self._model = model_of(width)
        self._optimizer = torch.optim.Adam(self._model.parameters(), fused=True)
        self._random = np.random.default_rng(0)
        self.read_s = self.step_s = 0.0

    def turn(self) -> None:
        began_s = time.perf_counter()
        chosen = np.sort(self._random.choice(IMAGES, BATCH, replace=False))  # as h5py wants its indices
        images, labels = torch.from_numpy(self._file["images"][chosen]), torch.from_numpy(self._file["labels"][chosen])
        read_at_s = time.perf_counter()
        loss = nn.functional.cross_entropy(self._model(images.flatten(1).float() / 255), labels)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self.read_s += read_at_s - began_s
        self.step_s += time.perf_counter() - read_at_s


def calibrated(file: Path) -> int:
    """The width at which a step takes as long as reading its batch."""
    width = 256
    for _ in range(8):
        by_hand = ByHand(file, width)
        for _ in range(6):
            by_hand.turn()
        ratio = by_hand.read_s / by_hand.step_s
        if 0.95 < ratio < 1.05:
            break
        width = max(8, int(width * ratio**0.8) // 8 * 8)
    return width


class Clock:
    """A journal that keeps the reports' samples per second and shares of waiting."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.waits: list[float] = []

    def log(self, step: int, values: Any) -> None:
        if "samples/per_s" in values:
            self.rates.append(values["samples/per_s"])
            self.waits.append(values["wait/data"])

    def record_event(self, kind: str, /, **details: object) -> None:
        """Not of interest."""

    def log_histogram(self, step: int, name: str, counts: Any, edges: Any) -> None:
        """Not of interest."""

    def flush(self) -> None:
        """Nothing is kept elsewhere."""


def ours(file: Path, width: int, steps: int) -> tuple[float, float]:
    """(samples per second, share of the time spent waiting), the medians of the reports after the first two."""
    spec = TrainSpec.parse(
        {"batch_size": BATCH, "loader": {"workers": 1}, "stop": {"steps": steps}, "log_every_steps": 10}
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        Trainer(spec, Images(str(file), width), World.single("cpu"), Path(folder), journal=clock).run()
    return statistics.median(clock.rates[2:]), statistics.median(clock.waits[2:])


def peer(file: Path, width: int, steps: int) -> tuple[float, float]:
    """(samples per second, reading's share of the time)."""
    by_hand = ByHand(file, width)
    for _ in range(10):
        by_hand.turn()
    by_hand.read_s = by_hand.step_s = 0.0
    for _ in range(steps):
        by_hand.turn()
    whole_s = by_hand.read_s + by_hand.step_s
    return BATCH * steps / whole_s, by_hand.read_s / whole_s


def child(side: str, file: str, width: str, steps: str) -> None:
    """One run of one side, in a process of its own."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if side == "calibrate":
        say(width=calibrated(Path(file)))
        return
    rate, share = (ours if side == "ours" else peer)(Path(file), int(width), int(steps))
    say(rate=rate, share=share)


def run(side: str, file: Path, width: int = 0, steps: int = 0) -> dict[str, Any]:
    words = [OUR_PYTHON, "-m", "benchmarks.input", side, str(file), str(width), str(steps)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    said = next(filter(None, map(parse, done.stdout.splitlines())), None)
    if said is None:
        sys.exit(f"{side} failed: {done.stderr[-2000:]}")
    return said


def main() -> None:
    chosen = options(__doc__, runs=7)
    steps = 40 if chosen.quick else 200
    mine, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "images.h5"
        write_images(file)
        width = int(statistics.median(run("calibrate", file)["width"] for _ in range(3)))
        for _ in range(chosen.runs):
            mine.append(run("ours", file, width, steps))
            theirs.append(run("peer", file, width, steps))
    waits, reads = (statistics.median(one["share"] for one in side) for side in (mine, theirs))
    note = f"reading is {reads:.0%} of the serial loop; ours waits for data {waits:.0%} of the time"
    rates = [[one["rate"] for one in side] for side in (mine, theirs)]
    row = compare("HDF5, loading as slow as the step", "samples/s", "higher", *rates, "serial loop", BAR, "ratio", note)
    write("input", [row], chosen.results)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in ("calibrate", "ours", "peer"):
        child(*sys.argv[1:])
    else:
        main()
