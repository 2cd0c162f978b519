"""Crops of photographs as a dataset: drawn towards the roots for training, all tiles of each for evaluation.

Called by Tasks; read by the Loader, a batch at once. Pictures stay bytes.
Legend: B crops, S pixels at the side of a crop, R of the larger one from which it is warped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.libs.segmentation.augmentation import Distortion, relight, warp
from shoal.libs.segmentation.photographs import IGNORED, Photograph
from shoal.libs.segmentation.thinning import thin_classes

MAX_POSITIONS = 4096  # of each class and photograph, from which crops are centred

Crops = tuple[Tensor, Tensor, Tensor]  # pictures uint8 [B, 3, S, S], classes uint8 and skeletons bool [B, S, S]


class _Photographs:
    """Photographs with their skeletons."""

    def __init__(self, photographs: Sequence[Photograph], num_classes: int) -> None:
        self.photographs, self.num_classes = list(photographs), num_classes
        self._skeletons = [thin_classes(each.classes, num_classes) for each in photographs]

    def _take(self, number: int, top: int, start: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A square of a photograph, which may reach over its borders: mirrored there, and of the class IGNORED."""
        each = self.photographs[number]
        height, width = each.classes.shape
        rows, columns = np.arange(top, top + size), np.arange(start, start + size)
        is_inside = ((rows >= 0) & (rows < height))[:, None] & ((columns >= 0) & (columns < width))
        down, right = _mirror(rows, height)[:, None], _mirror(columns, width)
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
        self.size, self.num_crops, self.foreground, self.distortion = size, num_crops, foreground, distortion
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
        taken = [self._draw(int(index) % len(self.photographs), side) for index in indices]
        pictures, classes, skeletons = (torch.from_numpy(np.stack(each)) for each in zip(*taken, strict=True))
        if self.distortion is None:
            return pictures, classes, skeletons
        planes = torch.stack([classes.float(), skeletons.float()], 1)
        warped, nearest = warp(pictures.float() / 255, planes, self.size, self.distortion, outside=IGNORED)
        lit = relight(warped, self.distortion).mul_(255).round_().to(torch.uint8)
        return lit, nearest[:, 0].to(torch.uint8), nearest[:, 1] == 1

    def _draw(self, number: int, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
        return self._take(number, int(row) - side // 2, int(column) - side // 2, side)


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
        corners = [self._corners[index] for index in indices]
        taken = [self._take(number, top, start, self.size) for number, top, start in corners]
        pictures, classes, skeletons = (torch.from_numpy(np.stack(each)) for each in zip(*taken, strict=True))
        return pictures, classes, skeletons


def _mirror(positions: np.ndarray, size: int) -> np.ndarray:
    """Positions folded into 0 to size - 1."""
    period = max(2 * (size - 1), 1)
    folded = positions % period
    return np.minimum(folded, period - folded) if size > 1 else folded * 0
