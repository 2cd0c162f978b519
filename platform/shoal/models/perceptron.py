"""A multilayer perceptron: a sequence of linear layers, GELU and dropout."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn


class Perceptron(nn.Sequential):
    """Rows float [B, num_features] to float [B, num_outputs], through layers as wide as `hidden` says."""

    def __init__(self, num_features: int, num_outputs: int, hidden: Sequence[int] = (64, 64), dropout: float = 0.0):
        layers: dict[str, nn.Module] = {}
        size = num_features
        for number, width in enumerate(hidden, start=1):
            layers[f"linear{number}"] = nn.Linear(size, width)
            layers[f"gelu{number}"] = nn.GELU()
            layers[f"dropout{number}"] = nn.Dropout(dropout)
            size = width
        layers["output"] = nn.Linear(size, num_outputs)
        super().__init__(OrderedDict(layers))
