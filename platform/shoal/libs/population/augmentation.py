"""Augmentations of images for many members at once: each member has a strength of its own, each image its own draw.

A Task names those that fit it (`augmentations`), and `augment_batch` applies them. All are batched tensor operations on
images of any dtype, with or without channels; a member's draws come from its own generator, so that they are those of
its solo run. Legend: K members, B images, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor

# (images [K, B, ..., H, W], strengths [K], a generator for each member) -> images of the same shape
Augmentation: TypeAlias = Callable[[Tensor, Tensor, Sequence[Generator]], Tensor]


def augment_batch(
    batch: Any,
    augmentations: Mapping[str, Augmentation],
    strengths: Mapping[str, Tensor],
    generators: Sequence[Generator],
) -> Any:
    """The batch [K, B, ...] with its inputs (the first of a tuple, `batch["inputs"]`, or the batch itself) augmented.

    strengths: [K] by name; the augmentations are applied in this order
    """
    if isinstance(batch, Tensor):
        return _augment(batch, augmentations, strengths, generators)
    if isinstance(batch, Mapping):
        return {**batch, "inputs": _augment(batch["inputs"], augmentations, strengths, generators)}
    return type(batch)((_augment(batch[0], augmentations, strengths, generators), *batch[1:]))


def _augment(
    images: Tensor,
    augmentations: Mapping[str, Augmentation],
    strengths: Mapping[str, Tensor],
    generators: Sequence[Generator],
) -> Tensor:
    for name, strength in strengths.items():
        images = augmentations[name](images, strength, generators)
    return images


def shift(images: Tensor, strengths: Tensor, generators: Sequence[Generator]) -> Tensor:
    """Move each image by up to `strengths` pixels up, down, left and right; pixels of the border fill the gap."""
    height, width = images.shape[-2:]
    moves = (2 * _draw(images, generators, 2) - 1) * strengths[:, None, None]  # [K, B, 2]
    down, right = moves.round().long().unbind(-1)
    pixels = _clamp_indices(height, down)[..., :, None] * width + _clamp_indices(width, right)[..., None, :]
    flat = images.flatten(-2)  # one gather over all pixels: five times as fast as one for rows, one for columns
    return flat.gather(-1, _fit(pixels.flatten(-2), flat).expand(flat.shape)).view(images.shape)


def flip(images: Tensor, strengths: Tensor, generators: Sequence[Generator]) -> Tensor:
    """Mirror each image left to right with a probability of `strengths`."""
    is_flipped = _draw(images, generators, 1)[..., 0] < strengths[:, None]
    return torch.where(_fit(is_flipped[..., None, None], images), images.flip(-1), images)


def erase(images: Tensor, strengths: Tensor, generators: Sequence[Generator]) -> Tensor:
    """Set a square of each image to 0, at a random position; its side is `strengths` times the image's
    (arXiv:1708.04552)."""
    draws = _draw(images, generators, 2)
    is_inside = [
        (positions - draws[..., axis, None] * size).abs() < strengths[:, None, None] * size / 2
        for axis, size in enumerate(images.shape[-2:])
        for positions in [torch.arange(size, device=images.device) + 0.5]
    ]  # [K, B, H] and [K, B, W]
    rows, columns = is_inside
    return images.masked_fill(_fit(rows[..., :, None] & columns[..., None, :], images), 0)


def noise(images: Tensor, strengths: Tensor, generators: Sequence[Generator]) -> Tensor:
    """Add normal noise with a standard deviation of `strengths`."""
    shape = images.shape[1:]
    drawn = torch.stack([torch.randn(shape, generator=each, device=each.device) for each in generators])
    return images + drawn.to(images.device) * strengths.view(-1, *[1] * (images.ndim - 1))


def brightness(images: Tensor, strengths: Tensor, generators: Sequence[Generator]) -> Tensor:
    """Multiply each image by a factor between 1 - `strengths` and 1 + `strengths`."""
    factors = 1 + (2 * _draw(images, generators, 1) - 1) * strengths[:, None, None]
    return images * _fit(factors[..., None], images)


def _fit(values: Tensor, images: Tensor) -> Tensor:
    """Values [K, B, ...] with as many dimensions as the images: new ones come after B."""
    missing = images.ndim - values.ndim
    return values.view(*values.shape[:2], *[1] * missing, *values.shape[2:])


def _draw(images: Tensor, generators: Sequence[Generator], count: int) -> Tensor:
    """Uniform numbers of 0 to 1 [K, B, count]."""
    size = (images.shape[1], count)
    return torch.stack([torch.rand(size, generator=each, device=each.device) for each in generators]).to(images.device)


def _clamp_indices(size: int, moves: Tensor) -> Tensor:
    """Where each pixel of a moved image comes from: [K, B, size]."""
    return (torch.arange(size, device=moves.device) - moves[..., None]).clamp_(0, size - 1)
