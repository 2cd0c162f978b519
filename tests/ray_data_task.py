"""A Task whose samples come from Ray Data, and which notes those that it sees."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from shoal.data import Data
from shoal.data.formats import RayData
from shoal.train import Task

NUM_SAMPLES = 96


class Lines(Task):
    """y = 2x + 1. `notes`: a file; the samples of each step are written there, a line of JSON a step."""

    def __init__(self, notes: str = "") -> None:
        self.notes = notes

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self) -> Data:
        import ray

        index = np.arange(NUM_SAMPLES)
        x = (index / NUM_SAMPLES).astype(np.float32)[:, None]
        rows = ray.data.from_numpy([index]).map_batches(
            lambda batch: {"index": batch["data"], "x": x[batch["data"]], "y": 2 * x[batch["data"]] + 1}
        )
        return Data(RayData(rows))

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch["x"],)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        if outputs.requires_grad and self.notes:
            with Path(self.notes).open("a") as file:
                file.write(json.dumps(batch["index"].tolist()) + "\n")
        return nn.functional.mse_loss(outputs, batch["y"])
