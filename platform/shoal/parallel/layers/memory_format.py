"""Images channels last in memory, [B, H, W, C], while their shape stays [B, C, H, W]: convolutions and pooling like it.

The values are the same but for the order in which some are summed. Parameters stay as they are, so that they can be
sharded, split, saved and loaded under any other plan. Called by `spread`. Legend: B images, C channels, H x W pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.errors import PlanError

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def check_channels_last(model: nn.Module) -> None:
    """Raises PlanError unless there is a convolution that would take its images so."""
    if not any(isinstance(module, CONVOLUTIONS) for module in model.modules()):
        problem = f"{type(model).__name__} has no convolution of two dimensions"
        raise PlanError("parallel.channels_last", True, problem, "leave it out")


def use_channels_last(model: nn.Module) -> None:
    """Each convolution reads its images channels last, and so do the layers that follow: they keep what they get."""
    for module in model.modules():
        if isinstance(module, CONVOLUTIONS):
            module.register_forward_pre_hook(_to_channels_last)


def _to_channels_last(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    images, *others = inputs
    if images.ndim == 3 or images.stride(1) == 1:  # one image without [B]; as it should be
        return inputs
    # Not `contiguous`: an image of one channel is channels last either way, and only its strides tell a convolution.
    return images.clone(memory_format=torch.channels_last), *others
