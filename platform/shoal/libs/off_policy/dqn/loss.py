"""DQN's targets and loss. Pure functions of tensors. Legend: B steps of a sample, A actions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class DQNLosses(NamedTuple):
    """`total` is minimised; errors [B] are the targets' distances, for the priorities."""

    total: Tensor
    errors: Tensor


def double_targets(returns: Tensor, discounts: Tensor, next_q: Tensor, next_target_q: Tensor) -> Tensor:
    """n-step targets of double DQN (van Hasselt et al., 1509.06461, equation 4; 1803.00933, §3.1). [B]

    returns and discounts [B] are of n steps, or of fewer at the end of a segment; a discount is 0 after termination.
    next_q, next_target_q [B, A]: by the learned network, which chooses the action, and by the target network.
    """
    chosen = next_q.argmax(-1, keepdim=True)
    return returns + discounts * next_target_q.gather(-1, chosen).squeeze(-1)


def dqn_loss(q: Tensor, actions: Tensor, targets: Tensor, weights: Tensor, delta: float) -> DQNLosses:
    """The Huber loss of the values q [B, A] of `actions` [B], weighted [B]; differentiable in q.

    Divided by `delta`, from which on it is linear: so gradients are at most 1, as with Nature's clipped errors.
    """
    values = q.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    per_step = nn.functional.huber_loss(values, targets, reduction="none", delta=delta) / delta
    return DQNLosses(torch.mean(weights * per_step), (targets - values).detach())
