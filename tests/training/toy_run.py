"""Runs of the Toy in this process, a tenth of a second each."""

from pathlib import Path
from typing import Any

import torch

from shoal.parallel import World
from shoal.runs import Run
from shoal.testing.run import MemoryLog, TaskRun, train
from shoal.train import Task
from shoal.train.spec import TrainSpec
from train_task import Toy


def spec_of(**changes: Any) -> TrainSpec:
    base = {
        "task": "Toy",
        "batch_size": 32,
        "stop": {"epochs": 2},
        "log_every_steps": 1,
        "optimizer": {"learning_rate": 0.01},
        "checkpoint": {"asynchronous": False},
    }
    return TrainSpec.parse({**base, **changes})


def losses_of(run: Run) -> dict[int, float]:
    """The newest loss that the record has of each step."""
    rows = run.metrics().dropna(subset=["train/loss"])
    return dict(zip(rows["train/step"].astype(int), rows["train/loss"], strict=True))


def train_toy(
    home: Path,
    task: Task | None = None,
    spec: TrainSpec | None = None,
    *,
    log: MemoryLog | None = None,
    interrupt_after: int | None = None,
    **changes: Any,
) -> TaskRun:
    """changes: of `spec_of`, where no spec is given"""
    spec = spec or spec_of(**changes)
    return train(task or Toy(), home=home, spec=spec, log=log, interrupt_after=interrupt_after)


def train_rank(world: World, folder: Path, spec: TrainSpec) -> dict[int, float]:
    """The program of a rank that nothing disturbs: the losses by step, on the first one."""
    return train(Toy(**spec.args), home=folder, spec=spec, world=world).losses


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert torch.equal(weight, other[name]), name
