"""Which optimiser is made, fused or with rates by group; a Task's own does what it does in plain PyTorch."""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import ASGD, SGD, Adam, NAdam, Optimizer, Rprop
from torch.optim.lr_scheduler import ExponentialLR

from shoal.errors import ConfigError
from shoal.testing.run import TaskRun
from shoal.train.optim.optimizers import can_fuse, make_optimizer, set_learning_rate
from shoal.train.spec import OptimizerSpec
from shoal.train.task import Task
from train_task import Toy
from training.toy_run import train_toy


class _Own(Task):
    """A Task with two rates."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        first, second = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.01}], momentum=0.0)


def _parameters(count: int = 2) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 3)) for _ in range(count)]


def _step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    sum(parameter.square().sum() for parameter in parameters).backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_the_fused_one_does_what_the_plain_one_does(name: str) -> None:
    results = []
    for fused in (True, False):
        parameters = _parameters()
        spec = OptimizerSpec.parse({"name": name, "weight_decay": 0.1, "learning_rate": 0.05, "fused": fused})
        optimizer = make_optimizer(Task(), spec, parameters)
        assert bool(optimizer.param_groups[0]["fused"]) is fused
        for _ in range(3):
            _step(optimizer, parameters)
        results.append(torch.stack([parameter.detach() for parameter in parameters]))
    torch.testing.assert_close(*results)


def test_distributed_tensors_are_fused_only_when_they_are_alike(group_of_one: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    plain = _parameters()
    split = [nn.Parameter(distribute_tensor(each.detach(), mesh, [Shard(0)])) for each in plain]
    whole = [nn.Parameter(distribute_tensor(each.detach(), mesh, [Replicate()])) for each in plain]
    assert can_fuse(split)
    assert can_fuse(plain)
    assert not can_fuse([*plain, *split])
    for parameters in (split, [*plain, *whole]):
        optimizer = make_optimizer(Task(), OptimizerSpec(), parameters)
        before = parameters[-1].detach().clone()
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert not torch.equal(parameters[-1].to_local(), before.to_local())


def test_a_tasks_own_optimizer_keeps_its_groups_rates() -> None:
    optimizer = make_optimizer(_Own(), OptimizerSpec(), _parameters())
    set_learning_rate(optimizer, 0.5, momentum=0.95)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.005]
    assert [group["momentum"] for group in optimizer.param_groups] == [0.0, 0.0]  # it wished for none
    set_learning_rate(optimizer, 1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]


def test_momentum_is_the_first_beta_or_sgds() -> None:
    adam = make_optimizer(Task(), OptimizerSpec(), _parameters())
    sgd = make_optimizer(Task(), OptimizerSpec(name="sgd"), _parameters())
    for optimizer in (adam, sgd):
        set_learning_rate(optimizer, 1.0, momentum=0.85)
    assert adam.param_groups[0]["betas"] == (0.85, 0.999)
    assert sgd.param_groups[0]["momentum"] == 0.85


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    optimizer = torch.optim.Adam(_parameters(), lr=torch.tensor(0.5))
    rate = optimizer.param_groups[0]["lr"]

    class Captured(Task):
        def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            return optimizer

    set_learning_rate(make_optimizer(Captured(), OptimizerSpec(), _parameters()), 0.5)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25


def test_a_stage_without_weights_has_an_optimizer_too() -> None:
    optimizer = make_optimizer(_Own(), OptimizerSpec(), [])
    optimizer.step()
    set_learning_rate(optimizer, 0.1)


class _OfTrained(Task):
    """A Task that leaves out what is frozen."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in parameters if each.requires_grad], lr=0.1)


def test_a_frozen_stage_has_an_optimizer_too() -> None:
    frozen = [each.requires_grad_(False) for each in _parameters()]
    make_optimizer(_OfTrained(), OptimizerSpec(), frozen).step()
    assert len(make_optimizer(_OfTrained(), OptimizerSpec(), [*frozen, *_parameters(1)]).param_groups[0]["params"]) == 1


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda parameters: "adam", r"Wrong\.optimizer gave a str"),
        (torch.optim.LBFGS, "LBFGS computes the loss again by itself"),
    ],
)
def test_what_is_no_optimizer_for_training_is_refused(made: Callable[..., Any], match: str) -> None:
    class Wrong(Task):
        def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = made(list(parameters))
            return optimizer

    with pytest.raises(ConfigError, match=match):
        make_optimizer(Wrong(), OptimizerSpec(), _parameters())


def test_words_that_an_optimizer_of_the_tasks_own_ignores_are_refused() -> None:
    make_optimizer(_Own(), OptimizerSpec(learning_rate=1e-3), _parameters())  # as it is when nothing is said
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate = 0\.5: _Own has an optimizer of its own"):
        make_optimizer(_Own(), OptimizerSpec(learning_rate=0.5), _parameters())


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


def train(folder: Path, steps: int, task: Own, **options: Any) -> TaskRun:
    return train_toy(folder, task, stop={"steps": steps}, optimizer={}, **options)


def falling(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Its rate is halved after each step."""
    optimizer = SGD(parameters, lr=0.8)
    scheduler = ExponentialLR(optimizer, 0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


def rates(folder: Path, steps: int, **changes: Any) -> list[float]:
    """After each step of this life."""
    log = train(folder, steps, Own(falling), **changes).log
    began = dict(log.events)["training"]["step"]
    return [rate for step, rate in log.get_curve("train/learning_rate").items() if step > began]


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
    found = train(tmp_path, 4, task).losses
    assert [found[step] for step in range(1, 5)] == pytest.approx(plain_losses(task, 4), rel=1e-5)  # in another order


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_it_goes_on_to_the_bit(tmp_path: Path, make: Make) -> None:
    whole = train(tmp_path / "whole", 5, Own(make)).losses
    first = train(tmp_path / "parts", 5, Own(make), interrupt_after=2).losses
    assert first | train(tmp_path / "parts", 5, Own(make)).losses == whole


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
