"""A Task that notes when its first loss is computed: see `benchmarks.training_start`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.data import Data
from shoal.train import Task


class FirstStep(Task):
    """A small model; `file` takes the moment (seconds since the epoch) of the first loss of the first epoch."""

    def __init__(self, file: str = "") -> None:
        self.file = file

    def model(self) -> nn.Module:
        return nn.Linear(8, 3)

    def data(self) -> Data:
        return Data(TensorDataset(torch.randn(64, 8), torch.randint(3, (64,))))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        path = Path(self.file)
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0 and not path.exists():
            path.write_text(json.dumps({"first_step": time.time()}))
        return nn.functional.cross_entropy(outputs, batch[1])
