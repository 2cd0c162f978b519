"""Tensors in messages: bytes, data type and shape. Called by servers and workers for what is not in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Packed = Sequence[Any]  # bytes, data type, shape


def pack(value: Tensor) -> tuple[bytes, str, list[int]]:
    """A copy of the values."""
    plain = value.detach().contiguous()
    return plain.numpy().tobytes(), str(plain.dtype).removeprefix("torch."), list(plain.shape)


def unpack(packed: Packed) -> Tensor:
    """A tensor of its own."""
    data, dtype, shape = packed
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape)
