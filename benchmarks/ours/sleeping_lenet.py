"""LeNet on Fashion-MNIST whose steps also sleep: on two cores stragglers must not compute longer."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import torch
from jobs.lenet import FashionTask
from torch import Tensor


class SleepingLeNet(FashionTask):
    """step_s: what a worker sleeps in a step; slowest: how many times as long worker 3 does"""

    def __init__(self, *, step_s: float = 0.03, slowest: float = 1.0) -> None:
        super().__init__()
        self.step_s, self.slowest = step_s, slowest

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            is_slowest = multiprocessing.current_process().name == "worker 3"
            time.sleep(self.step_s * (self.slowest if is_slowest else 1.0))
        return super().loss(outputs, batch)
