"""A perceptron whose steps take a given time by sleeping: on two cores stragglers must not compute."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.data import Data
from shoal.train import Task


class SleepingTask(Task):
    """Random classes.

    step_s:      of a worker
    slowest:     how many times as long worker 3 takes
    probability: with it, a step takes `slowness` times as long
    """

    def __init__(
        self, *, step_s: float = 0.02, slowest: float = 1.0, probability: float = 0.0, slowness: float = 4.0
    ) -> None:
        self.step_s, self.slowest, self.probability, self.slowness = step_s, slowest, probability, slowness

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10))

    def data(self) -> Data:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(65_536, 32, generator=generator)
        return Data(TensorDataset(x, torch.randint(10, (65_536,), generator=generator)))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            time.sleep(self._draw_step_s())
        return nn.functional.cross_entropy(outputs, batch[1])

    def _draw_step_s(self) -> float:
        name = multiprocessing.current_process().name
        if not hasattr(self, "_random"):
            self._random = np.random.default_rng(sum(map(ord, name)))
        slow = self.slowness if self._random.random() < self.probability else 1.0
        return self.step_s * slow * (self.slowest if name == "worker 3" else 1.0)
