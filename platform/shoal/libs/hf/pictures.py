"""Pictures as a model of Hugging Face takes them: by the image processor of its folder, or by its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from shoal.errors import ConfigError

PROCESSOR = "preprocessor_config.json"


@dataclass(frozen=True)
class Processed:
    """By the image processor of transformers."""

    processor: Any

    def __call__(self, picture: Image.Image) -> Tensor:
        pixels: Tensor = self.processor(images=picture, return_tensors="pt")["pixel_values"][0]
        return pixels


@dataclass(frozen=True)
class Resized:
    """To `size` (height, width), then from -1 to 1."""

    size: tuple[int, int]

    def __call__(self, picture: Image.Image) -> Tensor:
        resized = picture.resize((self.size[1], self.size[0]), Image.Resampling.BILINEAR)
        values = torch.from_numpy(np.array(resized)).float() / 127.5 - 1
        return values.unsqueeze(0) if values.dim() == 2 else values.permute(2, 0, 1)


def make_picture_transform(folder: Path, config: Mapping[str, Any]) -> Callable[[Image.Image], Tensor]:
    """Make one from a picture to [C, H, W]. Raises ConfigError."""
    if (folder / PROCESSOR).is_file():
        from transformers import AutoImageProcessor

        try:
            return Processed(AutoImageProcessor.from_pretrained(str(folder), local_files_only=True))
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError("model", str(folder / PROCESSOR), f"cannot be loaded: {error}") from error
    size = config.get("image_size")
    if size is None:
        remedy = f"copy {PROCESSOR} into it"
        raise ConfigError("model", str(folder), f"has neither {PROCESSOR} nor an image_size", remedy)
    return Resized(tuple(size) if isinstance(size, list | tuple) else (size, size))
