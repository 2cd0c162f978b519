"""LeNet on random images, in memory: what a step computes and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.data import Data
from shoal.train import Task


class ImageTask(Task):
    """28 x 28 pixels, ten classes."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip

    def data(self) -> Data:
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(8192, 1, 28, 28, generator=generator)
        return Data(train=TensorDataset(images, torch.randint(10, (8192,), generator=generator)))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])
