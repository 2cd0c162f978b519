"""Augmentation of pictures and their classes, for a full batch at once: one warp by `grid_sample`, then the light.

Called where crops are made. Draws from torch's global generator, which the loader seeds for each batch.
Legend: B crops, R and S pixels at the side of the input and the output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Distortion:
    """How far an augmentation goes; each crop draws its own amounts, uniformly.

    warped:     the share of crops that are rotated, scaled and bent, which blurs them a little; the others stay sharp
    rotation:   degrees to either side. Roots grow downwards: a full turn would hide what tells stem from main root
    scale:      the largest enlargement, and reduction
    elastic:    pixels by which the nodes of a coarse grid move; the field between them is smooth
    brightness, contrast, tint: shares of the full range, of the contrast, and of each colour
    noise:      the largest standard deviation, as a share of the full range
    """

    warped: float = 1.0
    rotation: float = 25.0
    scale: float = 1.2
    elastic: float = 6.0
    flips: bool = True
    brightness: float = 0.15
    contrast: float = 0.25
    tint: float = 0.06
    noise: float = 0.03

    def input_size(self, size: int) -> int:
        """The side of the input from which a crop of this side is taken: so large that few crops see its border."""
        angle = math.radians(min(self.rotation, 45.0))
        side = math.ceil(size * (math.cos(angle) + math.sin(angle)) + 2 * self.elastic)
        return side + (side - size) % 2  # with an odd margin, a crop that is not warped would fall between pixels


def warp(pictures: Tensor, labels: Tensor, size: int, chosen: Distortion, outside: int) -> tuple[Tensor, Tensor]:
    """Flip, rotate, scale and bend: pictures float [B, 3, R, R] and labels float [B, K, R, R] to [B, 3 or K, S, S].

    Pictures are interpolated; labels take the nearest pixel, and `outside` where there is none.
    """
    grid = _draw_grid(pictures, size, chosen)
    warped = functional.grid_sample(pictures, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    nearest = functional.grid_sample(labels - outside, grid, mode="nearest", align_corners=False) + outside
    return warped, nearest


def _draw_grid(pictures: Tensor, size: int, chosen: Distortion) -> Tensor:
    """Where each output pixel comes from: [B, S, S, 2] in grid_sample's coordinates of -1 to 1."""
    num, side = len(pictures), pictures.shape[-1]
    is_warped = torch.rand(num) < chosen.warped
    angles = torch.deg2rad(_uniform(num, chosen.rotation)) * is_warped
    scales = torch.exp(_uniform(num, math.log(chosen.scale)) * is_warped)
    mirror = torch.where(torch.rand(num) < 0.5, -1.0, 1.0) if chosen.flips else torch.ones(num)
    cosine, sine = angles.cos() / scales, angles.sin() / scales
    matrix = torch.stack([torch.stack([mirror * cosine, -sine], 1), torch.stack([mirror * sine, cosine], 1)], 1)
    steps = torch.arange(size) - (size - 1) / 2
    down, right = torch.meshgrid(steps, steps, indexing="ij")
    positions = torch.stack([right, down], -1).view(1, -1, 2) @ matrix.transpose(1, 2)  # [B, S * S, 2]
    if chosen.elastic:
        nodes = (2 * torch.rand(num, 2, 5, 5) - 1) * chosen.elastic * is_warped.view(-1, 1, 1, 1)
        field = functional.interpolate(nodes, size=(size, size), mode="bicubic", align_corners=True)
        positions = positions + field.flatten(2).transpose(1, 2)
    return (positions * (2 / side)).view(num, size, size, 2).to(pictures.device)


def relight(pictures: Tensor, chosen: Distortion) -> Tensor:
    """Change contrast, brightness and colours, and add noise: pictures float [B, 3, S, S] of 0 to 1, and so after."""
    num = len(pictures)
    gains = (1 + _uniform(num, chosen.contrast)).view(-1, 1, 1, 1) * (1 + _uniform((num, 3, 1, 1), chosen.tint))
    lifts = _uniform(num, chosen.brightness).view(-1, 1, 1, 1)
    deviations = chosen.noise * torch.rand(num, 1, 1, 1)
    noise = torch.randn(pictures.shape) * deviations
    means = pictures.mean((1, 2, 3), keepdim=True)
    moved = (pictures - means) * gains.to(pictures) + means + lifts.to(pictures) + noise.to(pictures)
    return moved.clamp_(0, 1)


def _uniform(shape: int | tuple[int, ...], limit: float) -> Tensor:
    """Uniform numbers between -limit and limit."""
    return (2 * torch.rand(shape) - 1) * limit
