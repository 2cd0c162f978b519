"""A perceptron that notes when each of its processes takes a step: see `benchmarks.elastic_pause`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.data import Data
from shoal.train import Task


class NotingTask(Task):
    """notes: a folder, where each process appends the times of its training steps to a file named by its number"""

    def __init__(self, *, notes: str = "", step_s: float = 0.01) -> None:
        self.notes, self.step_s = notes, step_s

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10))

    def data(self) -> Data:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(8192, 32, generator=generator)
        return Data(TensorDataset(x, torch.randint(10, (8192,), generator=generator)))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        if torch.is_grad_enabled() and len(batch[1]) > 2:  # not a trial before the first step
            time.sleep(self.step_s)
            with (Path(self.notes) / str(os.getpid())).open("a") as file:
                file.write(f"{time.time()}\n")
        return nn.functional.cross_entropy(outputs, batch[1])
