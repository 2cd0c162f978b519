"""A student for the LeNet of jobs/lenet.py, which `benchmarks.optimise` trains: strides in the place of pooling."""

from __future__ import annotations

from torch import nn


class Strided(nn.Sequential):
    """Images float [B, 1, 28, 28] to logits [B, 10], with a third of the LeNet's FLOPs."""

    def __init__(self) -> None:
        first, second = nn.Conv2d(1, 6, 5, 2, 2), nn.Conv2d(6, 12, 5, 2, 2)
        linear = nn.Linear(12 * 7 * 7, 32)
        super().__init__(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), linear, nn.ReLU(), nn.Linear(32, 10))
