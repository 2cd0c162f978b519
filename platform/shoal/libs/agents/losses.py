"""The loss of GRPO, RLOO and REINFORCE++, which differ in their advantages, and in whether ratios are clipped.

Pure functions of tensors. Legend: n trained tokens of a part of a batch; π the policy that is trained, μ the one that
has sampled, at the same temperature.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shoal.libs.agents.config import PolicyGradientTextConfig

MAX_LOG_RATIO = 20.0  # e^20 is no ratio of policies that are near each other, and its square is finite in float32


class TokenLosses(NamedTuple):
    """Of each token [n]; `losses` alone is differentiable.

    ratios:     π / μ
    is_clipped: whether it teaches nothing more
    kl:         estimate of the divergence from the reference; 0 without one
    """

    losses: Tensor
    ratios: Tensor
    is_clipped: Tensor
    kl: Tensor


def compute_token_losses(
    log_pi: Tensor,  # [n], differentiable
    log_mu: Tensor,
    advantages: Tensor,  # of the token's segment
    config: PolicyGradientTextConfig,
    log_reference: Tensor | None = None,
) -> TokenLosses:
    """-w min(r A, clip(r, 1 - ε, 1 + ε_high) A) + β k3 of each token, with r = π / μ.

    The surrogate is that of PPO, equation (7) of 1707.06347, as GRPO (equation (3) of 2402.03300) and REINFORCE++
    (2501.03262) have it for tokens; ε_high is DAPO's, equation (10) of 2503.14476. μ is what has really sampled the
    token, at any age, so that r needs no second correction.

    Without ε it is r A, whose gradient is r A ∇ log π: where π = μ, that is A ∇ log π of RLOO (2402.14740).

    The sum over a batch is divided by its trained tokens, equation (12) of 2503.14476. RLOO divides by sequences, Dr.
    GRPO (2503.20783) by a constant: for one batch all are the same gradient up to a factor, which AdamW does not see.

    w = min(1, ρ̄ / r) is a constant: the gradient of a token counts min(r, ρ̄) times, by truncated importance sampling
    (Ionides 2008; IMPALA, 1802.01561). r is unbounded where the advantage is negative.

    k3 = q / π - log(q / π) - 1, with the reference q, is Schulman's estimate of KL(π, q), equation (4) of 2402.03300.
    RLOO and REINFORCE++ subtract theirs from the reward; here it is the loss's, for all.
    """
    log_ratios = (log_pi - log_mu).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratios = log_ratios.exp()
    gains = ratios * advantages
    is_clipped = torch.zeros_like(gains, dtype=torch.bool)
    if config.clip is not None:
        high = config.clip if config.clip_high is None else config.clip_high
        clipped = ratios.clamp(1 - config.clip, 1 + high) * advantages
        is_clipped = clipped < gains
        gains = torch.minimum(gains, clipped)
    losses = -(config.rho_bar / ratios.detach()).clamp(max=1.0) * gains
    kl = torch.zeros_like(losses)
    if log_reference is not None:
        distances = log_reference - log_pi
        kl = distances.exp() - distances - 1
        losses = losses + config.kl_cost * kl
    return TokenLosses(losses, ratios.detach(), is_clipped, kl.detach())
