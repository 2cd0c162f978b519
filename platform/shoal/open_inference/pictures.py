"""Pictures as inputs of a model: in its size, its channels and its datatype. Needs Pillow.

Called by what takes pictures from people: the command line and the console.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from shoal.errors import DataError, needs_extra
from shoal.open_inference.datatypes import NUMPY_DTYPES
from shoal.open_inference.messages import TensorDescription, describe_tensor


def is_integer(spec: TensorDescription) -> bool:
    """Whether it has an integer type."""
    return spec.datatype != "BF16" and NUMPY_DTYPES[spec.datatype].kind in "iu"


def summarize_error(error: BaseException) -> str:
    """The error's message in one line; for a system error only its reason."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def read_picture(file: Path | IO[bytes], name: str, spec: TensorDescription, white: float | None) -> np.ndarray:
    """A picture as one row of an input, in its size and channels (1 or 3, before or after height and width).

    name:  of the file, for errors
    white: the number of a white pixel; None for 255 in integers and 1.0 in floats

    Integers are INT64, since `white` may be beyond the input's range. Raises DataError.
    """
    if white is not None and not math.isfinite(white):
        raise DataError("white", white, "is no number of a pixel", "for example 1 or 255")
    scale = (white if white is not None else 255.0 if is_integer(spec) else 1.0) / 255.0
    pixels = _load_pixels(file, name, spec)
    if not is_integer(spec):
        return (pixels * scale).astype(np.float32 if spec.datatype == "BF16" else NUMPY_DTYPES[spec.datatype])
    return pixels if scale == 1.0 else np.rint(pixels * scale).astype(np.int64)


def _load_pixels(file: Path | IO[bytes], name: str, spec: TensorDescription) -> np.ndarray:
    """Bytes [1, H, W], [3, H, W], [H, W] or [H, W, 3], like the input."""
    with needs_extra("data"):
        from PIL import Image

    sizes = list(spec.shape[1:])
    first = len(sizes) == 3 and sizes[0] in (1, 3)
    last = len(sizes) == 3 and sizes[2] in (1, 3) and not first
    if not (len(sizes) == 2 or first or last) or spec.datatype in ("BYTES", "BOOL"):
        problem = f"the model takes {describe_tensor(spec)}, which is no picture"
        raise DataError("image", name, problem, "send an array (--npy)")
    height, width = sizes[1:] if first else sizes[:2]
    is_grey = len(sizes) == 2 or (sizes[0] if first else sizes[2]) == 1
    try:
        with Image.open(file) as opened:
            if opened.mode in ("I", "F"):
                raise DataError("image", name, f"has 32 bits a pixel (mode {opened.mode})", "send an array (--npy)")
            # Of 16 bits take the upper ones: Pillow's own `convert` turns everything above 255 into white.
            is_deep = opened.mode.startswith("I;16")
            picture = Image.fromarray((np.asarray(opened) >> 8).astype(np.uint8)) if is_deep else opened
            image = picture.convert("L" if is_grey else "RGB")
    except DataError:
        raise
    except (
        OSError,
        ValueError,
        EOFError,
        SyntaxError,
        Image.DecompressionBombError,
        zlib.error,
        struct.error,
    ) as error:
        problem = f"is no picture: {summarize_error(error)}"
        raise DataError("image", name, problem, "give a PNG, JPEG or the like") from None
    wanted = (width if width > 0 else image.width, height if height > 0 else image.height)
    pixels = np.asarray(image if image.size == wanted else image.resize(wanted, Image.Resampling.BILINEAR))
    if is_grey and len(sizes) == 3:
        pixels = pixels[None] if first else pixels[..., None]
    elif first:
        pixels = pixels.transpose(2, 0, 1)
    return pixels
