"""One training of LeNet on Fashion-MNIST to 90% test accuracy: by the Trainer, or by a plain loop.

    python -m benchmarks.ours.fashion plain SEED THREADS                                          # the plain loop
    python -m benchmarks.ours.fashion channels_last SEED THREADS                                  # ... its model so
    [torchrun --nproc-per-node 2 -m] benchmarks.ours.fashion trainer SEED THREADS [A.B=C ...]     # the recipe

Both have the recipe's batch, optimiser, schedule and evaluations. Says after how many seconds of training steps, and
after how many steps, the target was met: the start, and the evaluations, are not counted.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.talk import say
from shoal.data.formats import Idx
from shoal.gc_freeze import freeze_loaded_objects
from shoal.models.lenet import LeNet
from shoal.parallel import World
from shoal.train import TrainSpec
from shoal.train.launch.overrides import load_recipe
from shoal.train.loop.trainer import Trainer
from shoal.train.optim.lr_schedule import compute_learning_rate, compute_momentum, resolve_total_steps
from shoal.train.reporting.time_to_accuracy import TRAINING_S
from shoal.train.task import make_task

TASK = "jobs/lenet.py"
FOLDER = Path("/usr/share/datasets/fashion-mnist")
TARGET = 0.9


class Evaluations:
    """A journal that keeps the accuracies: (step, seconds of training, accuracy)."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float, float]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if "validation/accuracy" in values:
            self.rows.append((step, values[TRAINING_S], values["validation/accuracy"]))

    def record_event(self, kind: str, /, **details: object) -> None:
        """Not of interest."""

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """Not of interest."""

    def flush(self) -> None:
        """Nothing is kept elsewhere."""


def tell(rows: list[tuple[int, float, float]]) -> None:
    """The first evaluation that met the target; the last one where none did."""
    met = next((row for row in rows if row[2] >= TARGET), None)
    step, seconds, accuracy = met or rows[-1]
    say(met=met is not None, steps=step, seconds=seconds, accuracy=accuracy, ms_a_step=1e3 * seconds / step)


def trainer(spec: TrainSpec) -> None:
    world = World.from_environment("cpu")
    evaluations = Evaluations()
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(world.broadcast(folder))
        Trainer(spec, make_task(spec.task, spec.args), world, shared, journal=evaluations).run()
        world.barrier()
    if world.is_first:
        tell(evaluations.rows)
    world.close()


def tensors(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images uint8 [N, 28, 28] and labels int64 [N], in memory."""
    paths = [FOLDER / f"{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
    source: Any = Idx(*paths, scale=False)
    images, labels = source.batch(np.arange(len(source)))
    return torch.as_tensor(images), torch.as_tensor(labels).long()


def plain(spec: TrainSpec, seed: int, memory_format: torch.memory_format) -> None:
    """What one writes without a platform: tensors in memory, a permutation an epoch."""
    torch.manual_seed(seed)
    task = make_task(spec.task, spec.args)
    model: nn.Module = LeNet().to(memory_format=memory_format)
    (images, labels), (test_images, test_labels) = tensors("train"), tensors("t10k")
    optimizer = torch.optim.Adam(model.parameters(), spec.optimizer.learning_rate, fused=True)
    steps_per_epoch = len(images) // spec.batch_size
    total = resolve_total_steps(spec, steps_per_epoch)
    every = round(steps_per_epoch * spec.evaluate.every_epochs)
    rows: list[tuple[int, float, float]] = []
    step, paused_s, began_s = 0, 0.0, time.perf_counter()
    while not rows or (rows[-1][2] < TARGET and step < (total or 0)):
        order = torch.randperm(len(images))
        for start in range(0, steps_per_epoch * spec.batch_size, spec.batch_size):
            factor, momentum = (
                compute_learning_rate(step, spec.schedule, total),
                compute_momentum(step, spec.schedule, total),
            )
            for group in optimizer.param_groups:
                group["lr"] = spec.optimizer.learning_rate * factor
                group["betas"] = (momentum or group["betas"][0], group["betas"][1])
            chosen = order[start : start + spec.batch_size]
            batch = (images[chosen], labels[chosen])
            loss = nn.functional.cross_entropy(model(*task.inputs(batch)), batch[1])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            if step % every == 0:
                at_s = time.perf_counter()
                with torch.no_grad():
                    found = model.eval()(*task.inputs((test_images, test_labels))).argmax(-1) == test_labels
                model.train()
                rows.append((step, at_s - began_s - paused_s, float(found.float().mean())))
                paused_s += time.perf_counter() - at_s
                if rows[-1][2] >= TARGET:
                    break
    tell(rows)


def main(side: str, seed: int, threads: int, words: list[str]) -> None:
    """Train once."""
    torch.set_num_threads(threads)
    changes = [f"seed={seed}", f"threads={threads}", "evaluate.every_epochs=0.25", *words]
    spec = load_recipe(TASK).override(changes)
    if side == "trainer":
        with freeze_loaded_objects():  # as `python -m shoal.train` does
            importlib.import_module("torch._dynamo")
        trainer(spec)
    else:
        plain(spec, seed, torch.channels_last if side == "channels_last" else torch.contiguous_format)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
