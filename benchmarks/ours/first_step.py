"""The job that the start of a training run is measured beside: Ray Train's TorchTrainer, with nothing around it.

    python benchmarks/ours/first_step.py FILE

Writes into FILE when rank 0 has computed its first loss (seconds since the epoch), and when `fit` was called.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn


def train(config: dict[str, Any]) -> None:
    """One rank: a step of a small model under DDP, with the optimiser that ours has by default."""
    model = prepare_model(nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters())
    loss = nn.functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(3, (16,)))
    if get_context().get_world_rank() == 0:
        Path(config["file"]).write_text(json.dumps({"first_step": time.time(), "fit": config["fit"]}))
    loss.backward()
    optimizer.step()


if __name__ == "__main__":
    ray.init(address="auto", log_to_driver=False)
    folder = Path(sys.argv[1]).parent
    settings = {"file": sys.argv[1], "fit": time.time()}
    TorchTrainer(
        train,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    ).fit()
