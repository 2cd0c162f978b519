"""PPO's loss and advantages, as pure functions of tensors.

Legend: N steps; T steps of the longest of B segments; `mask` is 1 on real steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shoal.rl.algorithms.ppo.config import PPOConfig
from shoal.rl.algorithms.vtrace import vtrace


class PPOTargets(NamedTuple):
    """Of each step, by the weights before the batch: log π_prox(a|x), advantages, value targets, and the weight
    min(ρ̄, π_prox / π_behaviour); all [N]."""

    log_probabilities: Tensor
    advantages: Tensor
    values: Tensor
    weights: Tensor


class PPOLosses(NamedTuple):
    """Scalars; `total` is minimised, means over the N steps."""

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    clip_fraction: Tensor
    kl: Tensor


@torch.no_grad()
def estimate_advantages(
    discounts_TB: Tensor,  # γ; 0 on the step that terminated the episode
    rewards_TB: Tensor,
    values_T1B: Tensor,
    mask_TB: Tensor,
    lambda_: float,
) -> Tensor:
    """Generalised advantages, equation (16) of 1506.02438: Σ_l (γλ)^l δ_{s+l}, [T, B].

    V-trace's targets with ρ = c = 1 are the λ-returns, and an advantage is the return without the value.
    """
    on_policy = torch.zeros_like(rewards_TB)
    return (
        vtrace(on_policy, discounts_TB, rewards_TB, values_T1B, mask_TB, lambda_=lambda_).targets_TB - values_T1B[:-1]
    )


def ppo_loss(
    logits: Tensor,  # [N, num_actions], differentiable as `values` [N]
    values: Tensor,
    actions: Tensor,
    targets: PPOTargets,
    config: PPOConfig,
) -> PPOLosses:
    """The clipped objective around π_prox, each step weighted by π_prox / π_behaviour: equation (3) of 2110.00641.

    With experience of the newest weights, π_prox is π_behaviour and this is PPO, equation (7) of 1707.06347.
    """
    log_policy = torch.log_softmax(logits, -1)
    log_pi = log_policy.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    entropy = -(log_policy.exp() * log_policy).sum(-1).mean()
    log_ratios = log_pi - targets.log_probabilities
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - config.clip, 1 + config.clip)
    gains = torch.minimum(ratios * targets.advantages, clipped * targets.advantages)
    policy_loss = -(targets.weights * gains).mean()
    value_loss = 0.5 * (values - targets.values).square().mean()
    total = policy_loss + config.value_cost * value_loss - config.entropy_cost * entropy
    with torch.no_grad():
        clip_fraction = ((ratios - 1).abs() > config.clip).float().mean()
        kl = (ratios - 1 - log_ratios).mean()
    return PPOLosses(total, policy_loss, value_loss, entropy, clip_fraction, kl)
