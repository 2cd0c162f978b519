"""A decoder of 30 million parameters on generated text, which `benchmarks.optimise` makes smaller."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.data import Data
from shoal.models.decoder import Decoder
from shoal.train import Task, TrainSpec

NUM_TOKENS, CONTEXT, CHOICES = 4800, 64, 4


def write_text(num_windows: int, seed: int) -> Tensor:
    """Windows [N, CONTEXT + 1] of a Markov chain, in which each of 64 common tokens has CHOICES successors."""
    successors = np.random.default_rng(0).integers(0, 64, (64, CHOICES))
    random = np.random.default_rng(seed)
    tokens = np.zeros((num_windows, CONTEXT + 1), np.int64)
    tokens[:, 0] = random.integers(0, 64, num_windows)
    for step in range(CONTEXT):
        tokens[:, step + 1] = successors[tokens[:, step], random.integers(0, CHOICES, num_windows)]
    return torch.from_numpy(tokens)


class Text(Task):
    """The next token of the text; width 512 has 30 million parameters, most of them in eight blocks."""

    def __init__(self, *, width: int = 512, depth: int = 8) -> None:
        self.width, self.depth = width, depth

    def model(self) -> nn.Module:
        return Decoder(NUM_TOKENS, CONTEXT, self.width, self.depth, heads=8)

    def data(self) -> Data:
        train, test = (TensorDataset(write_text(size, seed)) for seed, size in ((1, 8192), (2, 64)))
        return Data(train, validation=test)

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return (batch[0][:, :-1],)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch[0][:, 1:].flatten())


def spec() -> TrainSpec:
    return TrainSpec.parse(
        {
            "task": __file__,
            "name": "text",
            "batch_size": 4,
            "optimizer": {"name": "adamw", "learning_rate": 5e-4},
            "schedule": {"name": "cosine", "warmup": 0.1, "final": 0.1},
            "clip_norm": 1.0,
            "stop": {"steps": 120},
            "evaluate": {"every_steps": 120},
            "threads": 1,
        }
    )
