"""Images channels last in memory, [B, H, W, C], with the shape [B, C, H, W]: faster for convolutions and pooling.

The values are the same except for the order of some sums. Parameters are unchanged, so that they can be sharded, split,
saved and loaded under any other plan. Called by `parallelize`. Legend: B images, C channels, H x W pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.errors import PlanError

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def check_channels_last(model: nn.Module) -> None:
    """Raises PlanError unless there is a convolution that supports it."""
    if not any(isinstance(module, CONVOLUTIONS) for module in model.modules()):
        problem = f"{type(model).__name__} has no convolution of two dimensions"
        raise PlanError("parallel.channels_last", True, problem, "leave it out")


def use_channels_last(model: nn.Module) -> None:
    """Let each convolution read its images channels last; the layers that follow keep the format of their input."""
    for module in model.modules():
        if isinstance(module, CONVOLUTIONS):
            module.register_forward_pre_hook(_to_channels_last)


def _to_channels_last(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    images, *others = inputs
    if images.ndim == 3 or images.stride(1) == 1:  # one image without [B]; or already channels last
        return inputs
    # Not `contiguous`: an image of one channel is channels last in any case, and convolutions decide by strides.
    return images.clone(memory_format=torch.channels_last), *others
