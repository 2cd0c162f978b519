"""Training on a CUDA device: the same numbers as on the CPU, under every word that changes how a step is computed."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.data import Data
from shoal.errors import OutOfMemory
from shoal.parallel import World
from shoal.train import Task
from shoal.train.loop.trainer import Trainer
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


class Images(Task):
    """A small convolutional network on random images, whose labels follow from their means."""

    def __init__(self, dropout: float = 0.0, width: int = 8, norm: bool = True) -> None:
        self.dropout, self.width, self.norm = dropout, width, norm

    def model(self) -> nn.Module:
        normalise = nn.BatchNorm2d(self.width) if self.norm else nn.Identity()
        convolve = [nn.Conv2d(1, self.width, 3, padding=1), normalise, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        return nn.Sequential(*convolve, nn.Dropout(self.dropout), nn.Linear(self.width * 16, 4))

    def data(self) -> Data:
        images = torch.randn(512, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        labels = (images[:, 0, :4, :4].mean((1, 2)) > 0) * 2 + (images[:, 0, 4:, 4:].mean((1, 2)) > 0)
        rows = TensorDataset(images, labels.long())
        return Data(train=rows, validation=rows)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs.float(), batch[1])


@pytest.fixture(autouse=True)
def _exact_convolutions() -> Iterator[None]:
    """cuDNN rounds the factors of a convolution to 10 bits by default: what is compared here is the rest."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = allowed


@pytest.fixture
def group(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], World]]:
    """Makes a group of this process alone, with the back end of a group of many."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"

    def make() -> World:
        if device == "cuda":
            torch.cuda.set_device(0)
        dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        return World.from_process_group(device, 0)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def train(folder: Path, device: str | World, task: Task | None = None, **fields: Any) -> TrainResult:
    base = {"task": "Images", "batch_size": 64, "stop": {"steps": 12}, "optimizer": {"learning_rate": 0.01}}
    spec = TrainSpec.parse({**base, **fields})
    folder.mkdir(parents=True, exist_ok=True)
    world = World.single(device) if isinstance(device, str) else device
    return Trainer(spec, task or Images(), world, folder, run_id="r").run()


def weights_of(result: TrainResult) -> dict[str, Tensor]:
    assert result.weights is not None
    return safetensors.torch.load_file(result.weights)


def assert_close(one: TrainResult, other: TrainResult, tolerance: float) -> None:
    first, second = weights_of(one), weights_of(other)
    assert first.keys() == second.keys()
    for name, weight in first.items():
        assert torch.allclose(weight, second[name], rtol=tolerance, atol=tolerance), (
            name,
            float((weight - second[name]).abs().max()),
        )


# Without batch normalisation where Adam is: the gradient of a bias before it is nothing but rounding, which Adam scales
# up to a step.
@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": {"name": "sgd", "learning_rate": 0.05}},
        {"optimizer": {"name": "adam", "learning_rate": 0.003}},
        {"optimizer": {"name": "adamw", "learning_rate": 0.003, "fused": False}},
        {"clip_norm": 0.5, "optimizer": {"name": "sgd", "learning_rate": 0.05}},
        {"average": 0.9, "optimizer": {"name": "sgd", "learning_rate": 0.05}},
        {"parallel": {"accumulate": 4}, "optimizer": {"name": "sgd", "learning_rate": 0.05}},
        {"schedule": {"name": "one_cycle"}, "optimizer": {"name": "sgd", "learning_rate": 0.05}},
    ],
    ids=["sgd", "adam", "adamw", "clip", "average", "accumulate", "one_cycle"],
)
def test_a_device_trains_as_the_cpu_does(device: str, tmp_path: Path, fields: dict[str, Any]) -> None:
    task = Images(norm=fields["optimizer"]["name"] == "sgd" and "parallel" not in fields)
    assert_close(train(tmp_path / "cpu", "cpu", task, **fields), train(tmp_path / "gpu", device, task, **fields), 2e-3)


@pytest.mark.parametrize("words", [{"data": 1}, {"shard": True}], ids=["ddp", "fsdp"])
def test_a_group_trains_as_one_process_does(
    device: str, tmp_path: Path, group: Callable[[], World], words: dict[str, Any]
) -> None:
    fields: dict[str, Any] = {"optimizer": {"name": "sgd", "learning_rate": 0.05}}
    alone = train(tmp_path / "alone", device, **fields)
    assert_close(alone, train(tmp_path / "group", group(), parallel=words, **fields), 1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_lower_precision_learns_and_goes_on_from_its_checkpoint(device: str, tmp_path: Path, precision: str) -> None:
    if device == "cpu" and precision == "fp16":
        pytest.skip("fp16 is for CUDA")
    fields: dict[str, Any] = {"parallel": {"precision": precision}, "checkpoint": {"every_steps": 10}}
    train(tmp_path / "a", device, stop={"steps": 20}, **fields)
    resumed = train(tmp_path / "a", device, stop={"steps": 40}, **fields)
    at_once = train(tmp_path / "b", device, stop={"steps": 40}, **fields)
    assert resumed.steps == at_once.steps == 40
    assert at_once.metrics["loss"] < 1.0
    assert_close(resumed, at_once, 1e-2)


def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(device: str, tmp_path: Path) -> None:
    task = Images(dropout=0.5, norm=False)
    fields: dict[str, Any] = {"checkpoint": {"every_steps": 10}}
    train(tmp_path / "a", device, task, stop={"steps": 10}, **fields)
    resumed = train(tmp_path / "a", device, task, stop={"steps": 20}, **fields)
    assert_close(resumed, train(tmp_path / "b", device, task, stop={"steps": 20}, **fields), 1e-4)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_compiled_steps_train_as_eager_ones(device: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"optimizer": {"name": "sgd", "learning_rate": 0.05}}
    eager = train(tmp_path / "eager", device, **fields)
    assert_close(eager, train(tmp_path / "compiled", device, parallel={"compile": True}, **fields), 5e-3)


def test_a_batch_too_large_for_the_device_is_named(device: str, tmp_path: Path) -> None:
    if device == "cpu":
        pytest.skip("a host has too much memory")
    with pytest.raises(OutOfMemory) as caught:
        train(tmp_path, device, Images(width=1 << 20, norm=False), batch_size=512, stop={"steps": 1})
    assert "samples at a time" in str(caught.value)
    assert float(torch.ones(2, device=device).sum()) == 2.0


def test_evaluation_is_that_of_the_cpu(device: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"optimizer": {"name": "sgd", "learning_rate": 0.05}, "evaluate": {"every_steps": 4}}
    here, there = train(tmp_path / "cpu", "cpu", **fields), train(tmp_path / "gpu", device, **fields)
    assert there.metrics["loss"] == pytest.approx(here.metrics["loss"], rel=1e-3)
    assert os.listdir(tmp_path / "gpu") == os.listdir(tmp_path / "cpu")
