"""A perceptron on rows of 30 random numbers: linear layers that every plan can divide. See `plan_order` and `cost`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.data import Data
from shoal.models.perceptron import Perceptron
from shoal.train import Task, TrainSpec


class PerceptronTask(Task):
    def __init__(self, *, hidden: Sequence[int] = (64, 64)) -> None:
        self.hidden = tuple(hidden)

    def model(self) -> nn.Module:
        return Perceptron(30, 2, self.hidden)

    def data(self) -> Data:
        features = torch.randn(4096, 30, generator=torch.Generator().manual_seed(0))
        return Data(TensorDataset(features, (features[:, 0] > 0).long()))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


def spec() -> TrainSpec:
    return TrainSpec.parse({"task": __file__, "name": "perceptron", "batch_size": 32, "stop": {"epochs": 15}})
