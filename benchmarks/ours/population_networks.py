"""The networks of the population benchmarks, and batches of random numbers for them. Torch alone: peers use it too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

NUM_CLASSES = 10
SHAPES = {"lenet": (1, 28, 28), "convolution": (1, 28, 28), "perceptron": (64,)}


def make_network(name: str) -> nn.Module:
    """`lenet`: LeNet-5; `convolution`: kernels of 3, another shape; `perceptron`: 64-64-64-10."""
    if name == "perceptron":
        layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES)]
    elif name == "convolution":
        layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 12, 3), nn.ReLU()]
        layers += [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12 * 6 * 6, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES)]
    else:
        layers = [nn.Conv2d(1, 6, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2)]
        layers += [nn.ReLU(), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()]
        layers += [nn.Linear(84, NUM_CLASSES)]
    return nn.Sequential(*layers)


def make_batch(name: str, batch_size: int, members: int | None = None) -> tuple[Any, Any]:
    """Inputs of noise and classes; for each of the members where a number is given."""
    generator = torch.Generator().manual_seed(0)
    size = (batch_size,) if members is None else (members, batch_size)
    inputs = torch.randn(*size, *SHAPES[name], generator=generator)
    return inputs, torch.randint(NUM_CLASSES, size, generator=generator)
