"""Copies a forward's outputs from a device to the host: the one place where memory of the host is pinned for them.

Called by `torch_forward` and `cuda_graphs`, in the thread of the forward. The device writes to pinned memory by itself,
so all outputs are under way before the one wait, and no driver copies them a second time; torch reuses that memory once
an output is garbage. Small outputs are copied plainly, and so are inputs, which would have to be copied into pinned
memory first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

PINNED_BYTES = 1 << 20  # from which size on; benchmarks/gpu/predictor.py compares


def copy_to_host(outputs: Iterable[Any]) -> list[Any]:
    """Copy each tensor of the device into its own memory; other values are returned as they are."""
    copies, must_wait = [], False
    for each in outputs:
        if isinstance(each, Tensor) and each.nbytes >= PINNED_BYTES:
            each, must_wait = _allocate_pinned(each).copy_(each, non_blocking=True), True
        elif isinstance(each, Tensor):
            each = each.to("cpu", copy=True)
        copies.append(each)
    if must_wait:
        _wait_for_copies()
    return copies


def _allocate_pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def _wait_for_copies() -> None:
    torch.cuda.current_stream().synchronize()
