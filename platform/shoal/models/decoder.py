"""A decoder-only transformer: normalisation first, causal attention, GELU (arXiv:1706.03762; pre-norm: 2002.04745).

Called by the recipe jobs/transformer.py and by benchmarks. A sequence of embedding, blocks and head, so that it can be
cut between any two of them; queries, keys, values and outputs are layers of their own, so that each can be split by
columns or rows. Legend: B sequences, T tokens, D width, H heads.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn

INITIAL_STD = 0.02  # of embeddings and projections, as in GPT-2


class TokenAndPosition(nn.Module):
    """Tokens int64 [B, T] to the sum of both embeddings [B, T, D]; without positions when `positions` is False."""

    def __init__(self, num_tokens: int, context: int, width: int, positions: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(num_tokens, width)
        self.position = nn.Embedding(context, width) if positions else None
        for table in (self.token, self.position):
            if table is not None:
                nn.init.normal_(table.weight, std=INITIAL_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.token(tokens)
        if self.position is not None:
            embedded = embedded + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return embedded


class Attention(nn.Module):
    """Causal self-attention [B, T, D] to [B, T, D]. The number of heads follows from the width of the queries, so that
    a rank that holds a part of the columns computes its own heads."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.query = _make_linear(width, width)
        self.key = _make_linear(width, width)
        self.value = _make_linear(width, width)
        self.output = _make_linear(width, width, depth)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # [B, H, T, D / H]
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.output(mixed.transpose(1, 2).flatten(-2))
        return attended


class FeedForward(nn.Module):
    """Each token by itself, through a layer four times as wide: [B, T, D] to [B, T, D]."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.up = _make_linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.down = _make_linear(4 * width, width, depth)

    def forward(self, x: Tensor) -> Tensor:
        transformed: Tensor = self.down(self.gelu(self.up(x)))
        return transformed


class Block(nn.Module):
    """Attention and feed-forward, each added to what came in."""

    def __init__(self, width: int, heads: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, depth)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, depth)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = x + self.dropout(self.attention(self.norm1(x)))
        transformed: Tensor = attended + self.dropout(self.feed_forward(self.norm2(attended)))
        return transformed


class Head(nn.Module):
    """The last normalisation, and logits for the next token [B, T, num_tokens]."""

    def __init__(self, width: int, num_tokens: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.output = _make_linear(width, num_tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(self.norm(x))
        return logits


class Decoder(nn.Sequential):
    """Tokens int64 [B, T] to logits [B, T, num_tokens] of each next token; T is at most `context`.

    tied: input and output share one table (arXiv:1608.05859)
    """

    def __init__(
        self,
        num_tokens: int = 256,
        context: int = 64,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
        tied: bool = False,
        positions: bool = True,
    ) -> None:
        if width % heads:
            raise ValueError(f"width {width} cannot be divided into {heads} heads")
        embedding = TokenAndPosition(num_tokens, context, width, positions)
        head = Head(width, num_tokens)
        if tied:
            head.output.weight = embedding.token.weight
        layers: dict[str, nn.Module] = {"embedding": embedding}
        layers |= {f"block{number}": Block(width, heads, depth, dropout) for number in range(1, depth + 1)}
        super().__init__(OrderedDict(layers, head=head))


def _make_linear(num_inputs: int, num_outputs: int, depth: int | None = None, bias: bool = True) -> nn.Linear:
    """A projection; where it ends a branch of a block, smaller by the root of the number of branches, 2 `depth`."""
    layer = nn.Linear(num_inputs, num_outputs, bias=bias)
    nn.init.normal_(layer.weight, std=INITIAL_STD / (math.sqrt(2 * depth) if depth else 1.0))
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
