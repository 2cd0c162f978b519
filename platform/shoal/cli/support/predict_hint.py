"""Suggest a first `shoal predict` command from a model's signature. Called by `deploy`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from shoal.registry import ModelVersion, TensorSignature
from shoal.serve.spec.batch_layout import has_batch_first

MAX_VALUES = 12  # of one input in a command
OPEN_SIZE = 3  # used for a dimension of variable size
MIN_PIXELS = 8  # the smallest side of an image


def suggest_predict_command(version: ModelVersion) -> str:
    """`shoal predict` with a row of zeros, a text, or the name of an image; `--help` where that would be too long."""
    inputs = version.manifest.signature.inputs
    words = ["--image", "FILE"] if len(inputs) == 1 and _can_be_picture(inputs[0]) else _make_row_options(inputs)
    return shlex.join(["shoal", "predict", version.name, *(words or ["--help"])])


def _make_row_options(inputs: Sequence[TensorSignature]) -> list[str]:
    """Options that give one row of every input; [] when an input is too large."""
    words: list[str] = []
    for spec in inputs:
        sizes = [OPEN_SIZE if size == -1 else size for size in _get_row_shape(spec)]
        is_text = spec.datatype == "BYTES"
        if len(sizes) > (0 if is_text else 1) or math.prod(sizes) > MAX_VALUES:
            return []
        name = "" if len(inputs) == 1 else f"{spec.name}="
        words += ["--input", name + ("a text" if is_text else ",".join(["0"] * math.prod(sizes)))]
    return words


def _get_row_shape(spec: TensorSignature) -> list[int]:
    return spec.shape[1:] if has_batch_first(spec) else spec.shape


def _can_be_picture(spec: TensorSignature) -> bool:
    """[1 or 3, H, W] or [H, W, 1 or 3]."""
    sizes = _get_row_shape(spec)
    if len(sizes) != 3 or spec.datatype == "BYTES":
        return False
    sides = sizes[1:] if sizes[0] in (1, 3) else sizes[:2] if sizes[2] in (1, 3) else [0]
    return min(sides) >= MIN_PIXELS
