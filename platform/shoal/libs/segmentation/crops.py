"""Crops of photographs as a dataset: drawn towards the roots for training, all tiles of each for evaluation.

Called by Tasks; read by the Loader, a batch at once. Pictures stay bytes. A batch is augmented at once, one warp by
`grid_sample` and then the light, by torch's global generator, which the loader seeds for each batch.
Legend: B crops, S pixels at the side of a crop, R of the larger one from which it is warped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from shoal.libs.segmentation.photographs import IGNORED, Photograph
from shoal.libs.segmentation.thinning import thin_classes

MAX_POSITIONS = 4096  # of each class and photograph, from which crops are centred

Crops = tuple[Tensor, Tensor, Tensor]  # pictures uint8 [B, 3, S, S], classes uint8 and skeletons bool [B, S, S]


class _Photographs:
    """Photographs with their skeletons."""

    def __init__(self, photographs: Sequence[Photograph], num_classes: int) -> None:
        self.photographs, self.num_classes = list(photographs), num_classes
        self._skeletons = [thin_classes(each.classes, num_classes) for each in photographs]

    def _take_all(self, corners: Iterable[tuple[int, int, int]], size: int) -> Crops:
        """Squares by the numbers of their photographs, and their first rows and columns."""
        taken = [self._take(*corner, size) for corner in corners]
        pictures, classes, skeletons = (torch.from_numpy(np.stack(each)) for each in zip(*taken, strict=True))
        return pictures, classes, skeletons

    def _take(self, number: int, top: int, start: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A square of a photograph, which may reach over its borders: mirrored there, and of the class IGNORED."""
        each = self.photographs[number]
        height, width = each.classes.shape
        rows, columns = np.arange(top, top + size), np.arange(start, start + size)
        is_inside = ((rows >= 0) & (rows < height))[:, None] & ((columns >= 0) & (columns < width))
        down, right = reflect(rows, height)[:, None], reflect(columns, width)
        classes = np.where(is_inside, each.classes[down, right], IGNORED).astype(np.uint8)
        return each.picture[:, down, right], classes, self._skeletons[number][down, right] & is_inside


class TrainingCrops(_Photographs):
    """`num_crops` random crops an epoch, from each photograph alike.

    foreground: the share of crops that are centred on a pixel of a class, whichever of the photograph's classes equally
                often: a picture is 97% background. The others are anywhere
    distortion: None for crops as they are
    """

    def __init__(
        self,
        photographs: Sequence[Photograph],
        num_classes: int,
        size: int,
        num_crops: int,
        foreground: float = 1 / 3,
        distortion: Distortion | None = None,
    ) -> None:
        super().__init__(photographs, num_classes)
        self.size = size
        self.num_crops = num_crops
        self.foreground = foreground
        self.distortion = distortion
        random = np.random.default_rng(0)
        self._positions: list[list[np.ndarray]] = []  # for each class of each photograph, pixels [N, 2] of it
        for each in photographs:
            pixels = [np.argwhere(each.classes == label) for label in range(1, num_classes)]
            chosen = [some[random.permutation(len(some))[:MAX_POSITIONS]] for some in pixels if len(some)]
            self._positions.append(chosen)

    def __len__(self) -> int:
        return self.num_crops

    def batch(self, indices: np.ndarray) -> Crops:
        """Crops of the photographs at `indices`, by numbers from NumPy's and torch's global generators."""
        side = self.size if self.distortion is None else self.distortion.input_size(self.size)
        corners = (self._draw_corner(int(index) % len(self.photographs), side) for index in indices)
        pictures, classes, skeletons = self._take_all(corners, side)
        if self.distortion is None:
            return pictures, classes, skeletons
        planes = torch.stack([classes.float(), skeletons.float()], 1)
        warped, nearest = warp(pictures.float() / 255, planes, self.size, self.distortion, outside=IGNORED)
        lit = relight(warped, self.distortion).mul_(255).round_().to(torch.uint8)
        return lit, nearest[:, 0].to(torch.uint8), nearest[:, 1] == 1

    def _draw_corner(self, number: int, side: int) -> tuple[int, int, int]:
        height, width = self.photographs[number].classes.shape
        positions = self._positions[number]
        if positions and np.random.random() < self.foreground:
            chosen = positions[np.random.randint(len(positions))]
            row, column = chosen[np.random.randint(len(chosen))]
        else:  # so that the crop, without its margin, lies within the photograph where it fits
            row, column = (
                np.random.randint(min(self.size // 2, size // 2), max(size - self.size // 2, size // 2 + 1))
                for size in (height, width)
            )
        return number, int(row) - side // 2, int(column) - side // 2


class EvaluationTiles(_Photographs):
    """Every pixel of every photograph once, as squares that do not overlap."""

    deterministic = True

    def __init__(self, photographs: Sequence[Photograph], num_classes: int, size: int) -> None:
        super().__init__(photographs, num_classes)
        self.size = size
        self._corners = [
            (number, top, start)
            for number, each in enumerate(self.photographs)
            for top in range(0, each.classes.shape[0], size)
            for start in range(0, each.classes.shape[1], size)
        ]

    def __len__(self) -> int:
        return len(self._corners)

    def batch(self, indices: np.ndarray) -> Crops:
        return self._take_all((self._corners[index] for index in indices), self.size)


def reflect(positions: np.ndarray, size: int) -> np.ndarray:
    """Positions folded into 0 to size - 1."""
    period = max(2 * (size - 1), 1)
    folded = positions % period
    return np.minimum(folded, period - folded) if size > 1 else folded * 0


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
    flip = torch.where(torch.rand(num) < 0.5, -1.0, 1.0) if chosen.flips else torch.ones(num)
    cosine, sine = angles.cos() / scales, angles.sin() / scales
    still = torch.zeros(num)
    matrix = torch.stack([flip * cosine, -sine, still, flip * sine, cosine, still], 1).view(num, 2, 3)
    grid = functional.affine_grid(matrix * (size / side), [num, 1, size, size], align_corners=False)
    if chosen.elastic:
        nodes = (2 * torch.rand(num, 2, 5, 5) - 1) * chosen.elastic * is_warped.view(-1, 1, 1, 1)
        field = functional.interpolate(nodes, size=(size, size), mode="bicubic", align_corners=True)
        grid = grid + field.movedim(1, -1) * (2 / side)
    return grid.to(pictures.device)


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
