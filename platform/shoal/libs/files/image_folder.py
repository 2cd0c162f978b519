"""Pictures in folders, one folder for each class (Pillow)."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from shoal.errors import DataError, needs_extra
from shoal.extend.data import FileDataset, Indices
from shoal.libs.files.fields import require_path
from shoal.store import fetch

with needs_extra("data"):
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")


class ImageFolder(FileDataset):
    """`FOLDER/CLASS/picture.png`: (float32 [B, C, H, W] from 0 to 1, int64 [B]), classes numbered by name.

    size:      (height, width) to which every image is resized; None: they must all have one size
    mode:      "RGB" (3 channels) or "L" (1); images of 16 bits are converted to 8 before
    transform: from an image to the tensor of a sample; it must then take care of `size`. It may draw random numbers.
               Images of 32 bits (Pillow's modes I and F) have no defined white: they need a transform, which gets them
               unchanged
    """

    def __init__(
        self,
        folder: str | Path,
        size: tuple[int, int] | None = None,
        mode: Literal["RGB", "L"] = "RGB",
        transform: Callable[[Image.Image], Tensor] | None = None,
    ) -> None:
        parent = require_path(folder, "folder")
        if not parent.is_dir():
            raise DataError("folder", str(folder), "is a file", "give the folder that has one folder for each class")
        folders = sorted((each for each in parent.iterdir() if each.is_dir()), key=attrgetter("name"))
        self.classes = [each.name for each in folders]
        self.size = size
        self.mode = mode
        self.transform = transform
        if not self.classes:
            raise DataError("folder", str(folder), "has no folders in it", "put the pictures into one for each class")
        paths: list[Path] = []
        labels: list[int] = []
        for label, each in enumerate(folders):
            files = sorted((file for file in each.iterdir() if file.suffix.lower() in SUFFIXES), key=attrgetter("name"))
            if not files:
                raise DataError("folder", f"{folder}/{each.name}", "is empty: a class without pictures")
            paths += files
            labels += [label] * len(files)
        self.labels = np.array(labels, dtype=np.int64)
        self.deterministic = transform is None
        super().__init__(paths, len(paths))

    def shapes(self) -> dict[str, str]:
        counts = np.bincount(self.labels)
        classes = ",".join(f"{name} ({count})" for name, count in zip(self.classes, counts, strict=True))
        return {"classes": classes, "mode": self.mode, "size": str(self.size)}

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        fetch([self.paths[index] for index in indices])
        pictures = [self._read_picture(self.paths[index]) for index in indices]
        for picture, index in zip(pictures, indices, strict=True):
            if picture.shape != pictures[0].shape:
                sizes = f"{tuple(picture.shape)} where another is {tuple(pictures[0].shape)}"
                raise DataError("path", str(self.paths[index]), f"is ragged: {sizes}", "give ImageFolder a size")
        return torch.stack(pictures), torch.from_numpy(self.labels[indices])

    def _read_picture(self, path: Path) -> Tensor:
        try:
            with Image.open(path) as opened:
                picture = self._convert_mode(opened, path)
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError("path", str(path), f"is no picture, or a damaged one ({error})", "remove it") from error
        if self.transform is not None:
            return self.transform(picture)
        if self.size is not None and picture.size != (self.size[1], self.size[0]):
            picture = picture.resize((self.size[1], self.size[0]), Image.Resampling.BILINEAR)
        values = torch.from_numpy(np.array(picture)).to(torch.float32).div_(255)
        return values.unsqueeze(0) if values.dim() == 2 else values.permute(2, 0, 1)

    def _convert_mode(self, opened: Image.Image, path: Path) -> Image.Image:
        """Pillow's own `convert` clips values above 255: such images would silently become white."""
        if opened.mode.startswith("I;16"):
            return Image.fromarray((np.asarray(opened) >> 8).astype(np.uint8)).convert(self.mode)
        if opened.mode not in ("I", "F"):
            return opened.convert(self.mode)
        if self.transform is None:
            problem = f"has 32 bits a pixel (mode {opened.mode}): nobody says which value is white"
            raise DataError("path", str(path), problem, "give ImageFolder a transform")
        return opened.copy()

    def _open(self) -> Any:
        """Open each image separately."""
        return None
