"""A Task that fails on workers, and passes the check before them: see `benchmarks.failing_starts`."""

from __future__ import annotations

import os
import socket
from typing import Any

import ray
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.data import Data
from shoal.store import open_store
from shoal.train import Task


class FailingStart(Task):
    """driver: the process id of the driver, where it does not fail; port: one that is taken there"""

    def __init__(self, kind: str = "", driver: int = 0, port: int = 0) -> None:
        self.kind, self.driver, self.port = kind, driver, port

    def model(self) -> nn.Module:
        if os.getpid() != self.driver and ray.is_initialized():
            self._fail()
        return nn.Linear(8, 2)

    def _fail(self) -> None:
        match self.kind:
            case "import error":
                import a_module_that_is_not_on_this_host  # type: ignore[import-not-found]  # noqa: F401
            case "out of memory":
                torch.empty(1 << 55)
            case "port taken":
                socket.create_server(("127.0.0.1", self.port))
            case "bucket away":
                open_store("s3://no-such-bucket/data").read("x")

    def data(self) -> Data:
        inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        return Data(TensorDataset(inputs, (inputs.sum(1) > 0).long()))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])
