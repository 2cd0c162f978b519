"""The default network of a table: an ensemble of perceptrons that share their weights, on embedded columns.

Numbers are embedded by learnt frequencies (arXiv:2203.05556; beside them the number itself, as in arXiv:2407.04491),
words by vectors. Each member of the ensemble sees the inputs by a scale of its own, and has a head of its own; the
layers between are shared (the small variant of TabM, arXiv:2410.24210). Knows no columns' names.

Legend: B rows, N numbers, W words, E values of an embedding, K members, H width, C outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ColumnEmbedding(nn.Module):
    """numbers [B, N], categories int64 [B, W] ► [B, (N + W) * E]. Its width is `num_features`."""

    offsets: Tensor

    def __init__(
        self,
        num_numbers: int,
        category_sizes: Sequence[int] = (),
        width: int = 8,
        frequencies: int = 16,
        sigma: float = 0.3,
    ) -> None:
        super().__init__()
        self.num_features = (num_numbers + len(category_sizes)) * width
        self.frequency = nn.Parameter(torch.randn(num_numbers, frequencies) * sigma)
        self.phase = nn.Parameter(torch.rand(num_numbers, frequencies) * 2 * math.pi)
        self.mix = nn.Parameter(torch.randn(num_numbers, frequencies, width - 1) / math.sqrt(frequencies))
        self.shift = nn.Parameter(torch.zeros(num_numbers, width - 1))
        starts = torch.tensor([0, *category_sizes]).cumsum(0)
        self.register_buffer("offsets", starts[:-1], persistent=False)
        self.vectors = nn.Embedding(max(1, int(starts[-1])), width)
        with torch.no_grad():
            self.vectors.weight[starts[:-1] + 1 if category_sizes else []] = 0.0  # another word than those of training

    def forward(self, numbers: Tensor, categories: Tensor | None = None) -> Tensor:
        waves = torch.cos(2 * math.pi * numbers[..., None] * self.frequency + self.phase)  # [B, N, F]
        mixed = torch.einsum("bnf,nfe->bne", waves, self.mix) + self.shift
        embedded = [torch.cat([numbers[..., None], mixed.relu()], -1).flatten(1)]
        if categories is not None:
            embedded.append(self.vectors(categories + self.offsets).flatten(1))
        return torch.cat(embedded, 1)


class TableNetwork(nn.Module):
    """numbers [B, N], categories int64 [B, W] ► scores [B, K, C], of each member."""

    def __init__(
        self,
        num_numbers: int,
        category_sizes: Sequence[int],
        num_outputs: int,
        width: int = 128,
        depth: int = 2,
        members: int = 8,
        dropout: float = 0.1,
        embedding: int = 8,
    ) -> None:
        super().__init__()
        self.embedding = ColumnEmbedding(num_numbers, category_sizes, embedding)
        features = self.embedding.num_features
        # One draw for each column: the values of an embedding stay together.
        scales = torch.randn(members, features // embedding).repeat_interleave(embedding, 1)
        self.scales = nn.Parameter(scales)  # [K, F]
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(features, width), nn.ReLU(), nn.Dropout(dropout)]
            features = width
        self.layers = nn.Sequential(*layers)
        bound = 1 / math.sqrt(features)
        self.heads = nn.Parameter(torch.empty(members, features, num_outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(members, num_outputs))

    def forward(self, numbers: Tensor, categories: Tensor | None = None) -> Tensor:
        embedded = self.embedding(numbers, categories)  # [B, F]
        hidden = self.layers(embedded[:, None] * self.scales)  # [B, K, H]
        return torch.einsum("bkh,khc->bkc", hidden, self.heads) + self.bias
