"""A Task for runs on hosts: a line. On a host named `lost` steps become slow, so that no run ends before it is lost."""

import socket
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import shoal


class Line(shoal.Task):
    """notes: a file that gets a line, `model HOST` or `data HOST`, for each of them that is made"""

    num_calls = 0

    def __init__(self, *, notes: str = "") -> None:
        self.notes = notes

    def _note(self, what: str) -> None:
        if self.notes:
            with Path(self.notes).open("a") as file:
                file.write(f"{what} {socket.gethostname()}\n")

    def model(self) -> torch.nn.Module:
        self._note("model")
        return torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def data(self) -> shoal.Data:
        self._note("data")
        x = torch.arange(96.0)[:, None] / 96
        return shoal.Data(train=TensorDataset(x, 2 * x), validation=TensorDataset(x, 2 * x))

    def inputs(self, batch: Any) -> tuple[torch.Tensor]:
        return (batch[0],)

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        self.num_calls += 1
        time.sleep(4.0 if socket.gethostname() == "lost" and self.num_calls > 50 else 0.01)
        loss: torch.Tensor = (outputs - batch[1]).square().mean()
        return loss
