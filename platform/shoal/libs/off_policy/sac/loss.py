"""SAC's targets and losses, of 1812.05905. Pure functions of tensors. Legend: B steps of a sample, 2 critics."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def soft_targets(returns: Tensor, discounts: Tensor, next_q: Tensor, next_log_pi: Tensor, alpha: Tensor) -> Tensor:
    """r + γ (min Q̄(s', a') - α log π(a'|s')), a' by the present policy: equations (3) and (6), with two critics. [B]

    discounts [B] are 0 after termination. next_q [2, B] is by the target critics.
    """
    return returns + discounts * (next_q.min(0).values - alpha * next_log_pi)


def critic_loss(q: Tensor, targets: Tensor) -> Tensor:
    """½ E (Q(s, a) - target)², equation (5), summed over both critics; differentiable in q [2, B]."""
    return 0.5 * (q - targets).square().mean(-1).sum()


def actor_loss(log_pi: Tensor, q: Tensor, alpha: Tensor) -> Tensor:
    """E (α log π(a|s) - min Q(s, a)), equation (9); log_pi [B] and q [2, B] are differentiable in the policy."""
    return (alpha * log_pi - q.min(0).values).mean()


def temperature_loss(log_alpha: Tensor, log_pi: Tensor, target_entropy: float) -> Tensor:
    """E (-α log π(a|s) - α H̄), equation (18); differentiable in log_alpha [] alone."""
    return -(log_alpha.exp() * (log_pi.detach() + target_entropy)).mean()
