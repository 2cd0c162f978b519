"""`shoal optimise`: what is tried, measured after its last step, chosen and registered; and every wrong option."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import shoal
import shoal.runs
from shoal.cli import cli

TASK = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset
from shoal.data import Data
from shoal.train import Task, TrainSpec


def points(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 16, generator=generator)
    return TensorDataset(inputs, (inputs[:, :3] * torch.tensor([3.0, 2.0, 1.0])).argmax(1))


class Largest(Task):
    """Which of three numbers is the largest."""

    def __init__(self, *, width: int = 512, outlier: float = 0.0) -> None:
        self.width, self.outlier = width, outlier

    def model(self):
        return nn.Sequential(nn.Linear(16, self.width), nn.ReLU(), nn.Linear(self.width, self.width), nn.ReLU(),
                             nn.Linear(self.width, 3))

    def data(self):
        return Data(points(2048, 0), validation=points(512, 1))

    def preprocess(self, arrays):
        return {name: each / 10 for name, each in arrays.items()}

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])

    def metrics(self, outputs, batch):
        return {"accuracy": (outputs.argmax(-1) == batch[1]).float().mean(), "margin": outputs.amax()}


class Unmeasured(Largest):
    def data(self):
        return Data(points(64, 0))


class Wide(Largest):
    def inputs(self, batch):
        return (torch.cat([batch[0], batch[0]], 1),)


class Lossless(Largest):
    loss = Task.loss

    def train_step(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Student(nn.Module):
    def __init__(self, hidden: int = 32, outputs: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, hidden), nn.Tanh(), nn.Linear(hidden, outputs))

    def forward(self, inputs):
        return self.layers(inputs)


def spec():
    return TrainSpec.parse({"task": __file__, "batch_size": 128, "optimizer": {"learning_rate": 3e-3},
                            "stop": {"steps": 100}, "threads": 1, "evaluate": {"every_steps": 100}})
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("optimise")
    (found / "largest.py").write_text(TASK)
    return found


@pytest.fixture(autouse=True)
def _teacher(folder: Path, shoal_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(folder)
    shoal.fit("largest.py:Largest", name="largest")
    yield


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["optimise", *arguments], catch_exceptions=True)


def test_a_student_is_trained_converted_measured_and_registered() -> None:
    done = run("largest", "--data", "largest.py:Largest", "--student", "width=64", "--max-drop", "5%", "--json")
    assert done.exit_code == 0, (done.output, done.exception)
