"""Tasks of a few steps, made from seeds alone, and how they are trained here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from shoal.data import Data
from shoal.models.lenet import LeNet
from shoal.parallel import World
from shoal.testing.run import MemoryLog
from shoal.train import Task
from shoal.train.loop.trainer import Trainer
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec

CLASSES, FEATURES = 3, 8
WORD = f"{Path(__file__)}:Net"


class Net(Task):
    """kind: mlp, dropout, functional (dropout by torch's own generator), norm (batch norm), lenet or wide."""

    def __init__(self, kind: str = "mlp", count: int = 128, optimizer: str = "", width: int = 16) -> None:
        self.kind = kind
        self.count = count
        self.name = optimizer
        self.width = width

    def model(self) -> nn.Module:
        if self.kind == "lenet":
            return LeNet(num_classes=CLASSES, narrow=2)
        first, last = nn.Linear(FEATURES, self.width), nn.Linear(self.width, CLASSES)
        between: dict[str, list[nn.Module]] = {
            "dropout": [nn.Dropout(0.3)],
            "functional": [FunctionalDropout()],
            "norm": [nn.BatchNorm1d(self.width)],
            "wide": [nn.Linear(self.width, self.width), nn.Tanh()],
        }
        return nn.Sequential(first, *between.get(self.kind, []), nn.Tanh(), last)

    def data(self) -> Data:
        return Data(train=make_points(self.kind, self.count, 1), validation=make_points(self.kind, 50, 2))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": (outputs.argmax(-1) == batch[1]).float().mean()}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer | None:
        return getattr(torch.optim, self.name)(parameters, lr=0.01) if self.name else None


class FunctionalDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.3, self.training)


def make_points(kind: str, count: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=random)
    shape = (1, 28, 28) if kind == "lenet" else (FEATURES,)
    centres = torch.randn(CLASSES, *shape, generator=torch.Generator().manual_seed(0))
    return TensorDataset(centres[classes] + 0.5 * torch.randn(count, *shape, generator=random), classes)


BASE: dict[str, Any] = {
    "task": WORD,
    "batch_size": 32,
    "stop": {"steps": 6},
    "log_every_steps": 1,
    "evaluate": {"every_steps": 6},
    "optimizer": {"learning_rate": 0.01},
    "checkpoint": {"every_steps": 1000, "asynchronous": False},
    "threads": 2,
}


def make_spec(**changes: Any) -> TrainSpec:
    return TrainSpec.parse({**BASE, **changes})


def train(
    folder: Path, spec: TrainSpec, device: str, log: MemoryLog | None = None, world: World | None = None
) -> TrainResult:
    folder.mkdir(parents=True, exist_ok=True)
    task = Net(**spec.args)
    return Trainer(spec, task, world or World.single(device), folder, run_id="r", journal=log or MemoryLog()).run()


def load_weights(result: TrainResult) -> dict[str, Tensor]:
    assert result.weights is not None
    return safetensors.torch.load_file(result.weights)


def assert_same_weights(found: TrainResult, expected: TrainResult, rtol: float, atol: float) -> None:
    theirs = load_weights(expected)
    for name, value in load_weights(found).items():
        torch.testing.assert_close(
            value, theirs[name], rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


# Sums of float32 in another order, over six steps of Adam: a step moves a weight by up to the rate, 0.01, whose
# direction (g / sqrt(g^2)) amplifies rounding where a gradient is near zero. 1e-4 is a hundredth of one step.
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}


def require_cuda(device: str) -> torch.device:
    """The device, or a skip of what means nothing on another."""
    if device != "cuda":
        pytest.skip("of CUDA alone")
    return torch.device("cuda", 0)
