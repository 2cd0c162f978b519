"""An optimiser of the Task's own: it does what it does in plain PyTorch, from its first step and after a resumption."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adam, NAdam, Optimizer, Rprop
from torch.optim.lr_scheduler import ExponentialLR

from shoal.parallel import World
from shoal.train.loop.trainer import Trainer
from shoal.train.spec import TrainSpec
from train_task import Toy
from training.test_trainer import Notes, spec_of

Make = Callable[[Iterable[nn.Parameter]], Optimizer]
MAKERS: dict[str, Make] = {
    "rprop": lambda parameters: Rprop(parameters, lr=0.01),
    "asgd": lambda parameters: ASGD(parameters, lr=0.1),
    "nadam": lambda parameters: NAdam(parameters, lr=0.01),
    "dampened": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, dampening=0.9),
    "adam": lambda parameters: Adam(parameters, lr=0.01, fused=True),
}


class Own(Toy):
    """Its whole data is one batch. `made` is the network as it was made."""

    def __init__(self, make: Make) -> None:
        super().__init__(count=32, dropout=0.0)
        self.make = make

    def model(self) -> nn.Module:
        model = super().model()
        self.made = copy.deepcopy(model)
        return model

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return self.make(parameters)


def spec(steps: int, **changes: Any) -> TrainSpec:
    return spec_of(stop={"steps": steps}, optimizer={}, **changes)


def train(folder: Path, spec: TrainSpec, task: Own, stopped_at: int = 100) -> dict[int, float]:
    """The losses by step."""
    notes, steps = Notes(), iter(range(1, 100))
    Trainer(spec, task, World.single("cpu"), folder, journal=notes, should_stop=lambda: next(steps) >= stopped_at).run()
    return notes.losses


def falling(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Its rate is halved after each step."""
    optimizer = SGD(parameters, lr=0.8)
    scheduler = ExponentialLR(optimizer, 0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


def rates(folder: Path, steps: int, **changes: Any) -> list[float]:
    """After each step of this life."""
    notes = Notes()
    Trainer(spec(steps, **changes), Own(falling), World.single("cpu"), folder, journal=notes).run()
    began = dict(notes.events)["training"]["step"]
    return [row["train/learning_rate"] for step, row in sorted(notes.metrics.items()) if step > began]


def plain_losses(task: Own, steps: int) -> list[float]:
    """Those of a loop over the batch in plain PyTorch."""
    model, data = task.made, task.data().train
    optimizer = task.make(model.parameters())
    batch: list[Tensor] = [torch.stack([torch.as_tensor(each) for each in part]) for part in zip(*data, strict=True)]
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = task.loss(model(batch[0]), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_its_losses_are_those_of_plain_pytorch(tmp_path: Path, make: Make) -> None:
    task = Own(make)
    found = train(tmp_path, spec(4), task)
    assert [found[step] for step in range(1, 5)] == pytest.approx(plain_losses(task, 4), rel=1e-5)  # in another order


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_it_goes_on_to_the_bit(tmp_path: Path, make: Make) -> None:
    whole = train(tmp_path / "whole", spec(5), Own(make))
    first = train(tmp_path / "parts", spec(5), Own(make), stopped_at=2)
    assert first | train(tmp_path / "parts", spec(5), Own(make)) == whole


def test_its_own_schedule_is_not_undone_and_goes_on(tmp_path: Path) -> None:
    assert rates(tmp_path, 3) == [0.4, 0.2, 0.1]
    assert rates(tmp_path, 5) == [0.05, 0.025]
    assert rates(tmp_path / "again", 2) == [0.4, 0.2]


def test_a_schedule_that_is_asked_for_sets_its_rates(tmp_path: Path) -> None:
    linear = {"name": "linear", "total_steps": 4}
    assert rates(tmp_path, 2, schedule=linear) == pytest.approx([0.4, 0.3])  # of 0.8 and 0.6, and halved by its own
    assert rates(tmp_path, 4) == [0.4, 0.2]  # without the schedule that moved them, it begins at its own again


def test_a_warm_up_sets_its_rates(tmp_path: Path) -> None:
    assert rates(tmp_path, 4, schedule={"warmup": 3}) == pytest.approx([0.4 / 3, 0.8 / 3, 0.4, 0.4])
