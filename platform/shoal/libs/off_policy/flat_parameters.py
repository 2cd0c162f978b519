"""The parameters of a small network as one tensor: an optimizer's step is then a few operations, however many layers.

Called by algorithms with many steps of the optimizer a second, where the cost of each operation counts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def flatten_parameters(model: nn.Module) -> nn.Parameter:
    """Lay the parameters of `model` end to end, and their gradients too; those of the model become views of them.

    Gradients add up in `.grad` of the result: set it to zero in place.
    """
    parameters = list(model.parameters())
    flat = nn.Parameter(torch.cat([each.detach().flatten() for each in parameters]))
    flat.grad = torch.zeros_like(flat)
    sizes = [each.numel() for each in parameters]
    for each, values, gradient in zip(parameters, flat.detach().split(sizes), flat.grad.split(sizes), strict=True):
        each.data, each.grad = values.view_as(each), gradient.view_as(each)
    return flat


def clip_gradient(gradient: Tensor, max_norm: float) -> float:
    """Scale `gradient` in place to a norm of at most `max_norm`; returns its norm before."""
    norm = float(gradient.norm())
    if norm > max_norm:
        gradient.mul_(max_norm / norm)
    return norm
