"""Prediction for pictures of any size: overlapping tiles, weighted so that a tile's centre counts most, and mirrored.

Called by networks that an endpoint serves, and by scores over full pictures.
Legend: C classes, H and W pixels of the picture, S of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

TILES_AT_ONCE = 4


def predict_probabilities(
    network: Callable[[Tensor], Tensor], picture: Tensor, tile: int = 256, overlap: float = 0.5, flips: bool = False
) -> Tensor:
    """Probabilities float [C, H, W] of a picture uint8 [3, H, W], by a network of [B, 3, S, S] to logits [B, C, S, S].

    tile: side in pixels, one that the network can take; overlap: of neighbouring tiles, a share of the side
    flips: average with the prediction for the mirrored picture; takes twice as long

    Tiles are weighted by a Gaussian of σ = S / 8, as in nnU-Net (10.1038/s41592-020-01008-z). A smaller picture is
    mirrored at its borders up to one tile.
    """
    height, width = picture.shape[-2:]
    padded = _pad(picture, tile)
    starts = [_find_starts(size, tile, overlap) for size in padded.shape[-2:]]
    corners = list(product(*starts))
    steps = (torch.arange(tile) - (tile - 1) / 2) / (tile / 8)
    line = torch.exp(-(steps**2) / 2).to(picture.device)
    weights = (line[:, None] * line[None, :]).clamp_(min=1e-3)  # never so small that a corner would be lost
    total = torch.zeros(0)
    for first in range(0, len(corners), TILES_AT_ONCE):
        some = corners[first : first + TILES_AT_ONCE]
        tiles = torch.stack([padded[:, top : top + tile, start : start + tile] for top, start in some])
        probabilities = network(tiles).float().softmax(1)
        if flips:
            probabilities = (probabilities + network(tiles.flip(-1)).float().softmax(1).flip(-1)) / 2
        if not total.numel():
            total = probabilities.new_zeros(probabilities.shape[1], *padded.shape[-2:])
        for each, (top, start) in zip(probabilities, some, strict=True):
            total[:, top : top + tile, start : start + tile] += each * weights
    total = total[:, :height, :width]
    return total / total.sum(0, keepdim=True)


def _pad(picture: Tensor, tile: int) -> Tensor:
    """Mirror the picture at its right and lower border until a tile fits in it."""
    down, right = (max(tile - size, 0) for size in picture.shape[-2:])
    if not (down or right):
        return picture
    for axis, more in ((1, down), (2, right)):
        size = picture.shape[axis]
        period = max(2 * (size - 1), 1)
        folded = torch.arange(size + more) % period  # as often as it takes
        mirrored = torch.minimum(folded, (period - folded) % period if size > 1 else folded * 0)
        picture = picture.index_select(axis, mirrored.clamp(max=size - 1).to(picture.device))
    return picture


def _find_starts(size: int, tile: int, overlap: float) -> list[int]:
    """The first pixel of each tile along one side: evenly spaced, at most (1 - overlap) tiles apart."""
    step = max(round(tile * (1 - overlap)), 1)
    count = -(-(size - tile) // step) + 1
    return [round(index * (size - tile) / max(count - 1, 1)) for index in range(count)]


def remove_background(pictures: Tensor, kernel: int) -> Tensor:
    """Grey minus its mean over kernel x kernel pixels: float [B, 1, H, W] of pictures float [B, 3, H, W].

    What changes slowly (illumination, moisture, shadows of the frame) goes; lines stay. Near a border the mean is over
    the pixels that exist.
    """
    grey = pictures.mean(1, keepdim=True)
    pad = kernel // 2
    rows = functional.avg_pool2d(grey, (kernel, 1), 1, (pad, 0), count_include_pad=False)
    return grey - functional.avg_pool2d(rows, (1, kernel), 1, (0, pad), count_include_pad=False)
