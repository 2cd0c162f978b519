"""A U-Net (arXiv:1505.04597) for thin things, and the form of it that an endpoint serves: a picture in, a mask out.

Called by the recipe jobs/roots.py and by benchmarks. Groups are normalised, not batches: a tile's result depends on the
tile alone. A picture of any size is predicted by overlapping tiles.
Legend: B pictures, C classes with the background as 0, H and W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.errors import DataError, InferenceError
from shoal.libs.segmentation.crops import reflect
from shoal.libs.segmentation.photographs import decode_picture, encode_mask, find_region, shrink_picture
from shoal.libs.segmentation.scores import measure_lengths

BACKGROUND_KERNEL = 31  # pixels: several times the width of a root
OVERLAP = 1 / 3  # of neighbouring tiles
MAX_PIXELS = 50_000_000  # of a request's picture
TILES_AT_ONCE = 4


class _Block(nn.Sequential):
    """Two convolutions of 3 x 3, each normalised in groups."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        layers: list[nn.Module] = []
        for channels in (num_inputs, num_outputs):
            layers += [
                nn.Conv2d(channels, num_outputs, 3, padding=1, bias=False),
                nn.GroupNorm(math.gcd(8, num_outputs), num_outputs),
                nn.LeakyReLU(0.01, inplace=True),
            ]
        super().__init__(*layers)


class UNet(nn.Module):
    """Pictures [B, 3, H, W] of 0 to 255, bytes or floats, to logits float [B, C, H, W]. H and W divide by 2^(levels-1).

    width:      channels of the first level; each further one has twice as many
    background: whether the picture without its slow changes is a fourth channel
    With 16 and 4 levels it has 0.48 million parameters.
    """

    def __init__(self, num_classes: int, width: int = 16, levels: int = 4, background: bool = True) -> None:
        super().__init__()
        self.background = background
        widths = [width << level for level in range(levels)]
        self.down = nn.ModuleList(_Block(*pair) for pair in pairwise([4 if background else 3, *widths]))
        self.up = nn.ModuleList(_Block(wide + narrow, narrow) for narrow, wide in pairwise(widths))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        pixels = pictures.to(self.head.weight.dtype) / 255
        features = (pixels - 0.5) / 0.25
        if self.background:
            features = torch.cat([features, remove_background(pixels, BACKGROUND_KERNEL) / 0.1], 1)
        skipped: list[Tensor] = []
        for level, block in enumerate(self.down):
            features = block(functional.max_pool2d(features, 2) if level else features)
            skipped.append(features)
        for block, narrow in zip(reversed(self.up), reversed(skipped[:-1]), strict=True):
            features = block(torch.cat([functional.interpolate(features, scale_factor=2.0), narrow], 1))
        logits: Tensor = self.head(features)
        return logits


class PictureSegmenter(UNet):
    """A U-Net that also answers requests: see `predict`. Its weights are those of the U-Net.

    colours: of the classes in the mask's palette; region, shrink: as of the MaskFormat that it was trained with
    tile, flips: see `predict_probabilities`
    """

    def __init__(
        self,
        num_classes: int,
        width: int = 16,
        levels: int = 4,
        background: bool = True,
        *,
        colours: Sequence[str],
        region: Sequence[float] | None = None,
        shrink: int = 1,
        tile: int = 128,
        flips: bool = False,
    ) -> None:
        super().__init__(num_classes, width, levels, background)
        self.num_classes = num_classes
        self.colours = tuple(colours)
        self.region = region
        self.shrink = shrink
        self.tile, self.flips = tile, flips

    def predict(self, picture: np.ndarray) -> dict[str, Any]:
        """The masks of encoded pictures (PNG, JPEG, ...) of any size, bytes [B].

        Gives "mask", PNG files bytes [B] whose pixels are the classes, and "length" float32 [B, C - 1], each class's
        length in pixels. Raises InferenceError (422) for bytes that are no picture, and for one that is too large.
        """
        masks, lengths = [], []
        for row, content in enumerate(picture.tolist()):
            classes = self.segment(self._decode(content, row))
            masks.append(encode_mask(classes, self.colours))
            lengths.append(measure_lengths(classes, self.num_classes))
        return {"mask": np.array(masks, object), "length": torch.tensor(lengths)}

    def segment(self, picture: np.ndarray) -> np.ndarray:
        """The classes uint8 [H, W] of a picture uint8 [3, H, W]: its region, shrunk; the rest is background."""
        _, height, width = picture.shape
        classes = np.zeros((height, width), np.uint8)
        rows, columns = find_region(self.region or (0, 0, 1, 1), height, width)
        inside = picture[:, rows, columns]
        step = min(self.shrink, *inside.shape[1:])
        labels = self.classify(shrink_picture(inside, step) if step > 1 else inside)
        labels = labels.repeat(step, 0).repeat(step, 1)
        classes[rows, columns][: labels.shape[0], : labels.shape[1]] = labels
        return classes

    def classify(self, picture: np.ndarray) -> np.ndarray:
        """The classes uint8 [H, W] of a picture uint8 [3, H, W], as it is."""
        pixels = torch.from_numpy(np.ascontiguousarray(picture)).to(self.head.weight.device)
        with torch.no_grad():
            best = predict_probabilities(self, pixels, self.tile, OVERLAP, self.flips).argmax(0)
        classes: np.ndarray = best.to(torch.uint8).numpy(force=True)
        return classes

    def _decode(self, content: bytes | str, row: int) -> np.ndarray:
        if isinstance(content, str):
            content = content.encode()
        try:
            picture = decode_picture(content, f"row {row}, {len(content):,} bytes")
        except DataError as error:
            raise InferenceError(422, f"{error.value}: {error.problem}") from error
        if picture[0].size > MAX_PIXELS:
            raise InferenceError(422, f"row {row} has {picture[0].size:,} pixels: at most {MAX_PIXELS:,} are answered")
        return picture


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
        reflected = torch.from_numpy(reflect(np.arange(size + more), size))  # as often as it takes
        picture = picture.index_select(axis, reflected.to(picture.device))
    return picture


def _find_starts(size: int, tile: int, overlap: float) -> list[int]:
    """The first pixel of each tile along one side: evenly spaced, at most (1 - overlap) tiles apart."""
    step = max(round(tile * (1 - overlap)), 1)
    starts: list[int] = np.linspace(0, size - tile, -(-(size - tile) // step) + 1).round().astype(int).tolist()
    return starts


def remove_background(pictures: Tensor, kernel: int) -> Tensor:
    """Grey minus its mean over kernel x kernel pixels: float [B, 1, H, W] of pictures float [B, 3, H, W].

    What changes slowly (illumination, moisture, shadows of the frame) goes; lines stay. Near a border the mean is over
    the pixels that exist.
    """
    grey = pictures.mean(1, keepdim=True)
    pad = kernel // 2
    rows = functional.avg_pool2d(grey, (kernel, 1), 1, (pad, 0), count_include_pad=False)
    return grey - functional.avg_pool2d(rows, (1, kernel), 1, (0, pad), count_include_pad=False)
