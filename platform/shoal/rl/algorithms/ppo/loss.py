"""PPO's loss and advantages, as pure functions of tensors.

Legend: N steps; T steps of the longest of B segments; `mask` is 1 on real steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shoal.models.action_distribution import Categorical, MultiCategorical, SquashedGaussian
from shoal.rl.algorithms.ppo.config import PPOConfig
from shoal.rl.algorithms.segments import compute_moments
from shoal.rl.algorithms.vtrace import vtrace


class PPOTargets(NamedTuple):
    """Of each step: log μ(a|x) of the policy μ that has acted; by the weights before the batch, advantages and value
    targets; all [N]."""

    log_probabilities: Tensor
    advantages: Tensor
    values: Tensor

    def select(self, chosen: Tensor) -> PPOTargets:
        """Those of some steps."""
        return PPOTargets(*(each[chosen] for each in self))


class PPOLosses(NamedTuple):
    """Scalars; `total` is minimised. Sums over the N steps divided by those of all learners: means, where it is one.

    moments: [4], of the values' errors and targets, for `explain_variance`
    """

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    clip_fraction: Tensor
    kl: Tensor
    moments: Tensor


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
    outputs: Tensor,  # of the distribution, [N, ...], differentiable as `values` [N]
    values: Tensor,
    actions: Tensor,
    targets: PPOTargets,
    config: PPOConfig,
    distribution: Categorical | MultiCategorical | SquashedGaussian,
    num_steps: int | None = None,
) -> PPOLosses:
    """The clipped objective, equation (7) of 1707.06347, around the policy μ that has acted, of any age.

    So a step teaches nothing more once π / μ has left the range, and π stays near the policies whose experience is on
    its way. The gradient of a step counts at most ρ̄ times: π / μ is unbounded where the advantage is negative.
    num_steps: of all learners, where others have the other steps of the minibatch
    """
    num_steps = num_steps or len(values)
    log_pi, entropies = distribution.evaluate(outputs, actions)
    entropy = entropies.sum() / num_steps
    log_ratios = log_pi - targets.log_probabilities
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - config.clip, 1 + config.clip)
    gains = torch.minimum(ratios * targets.advantages, clipped * targets.advantages)
    policy_loss = -((config.rho_bar / ratios.detach()).clamp(max=1.0) * gains).sum() / num_steps
    value_loss = 0.5 * (values - targets.values).square().sum() / num_steps
    total = policy_loss + config.value_cost * value_loss - config.entropy_cost * entropy
    with torch.no_grad():
        clip_fraction = ((ratios - 1).abs() > config.clip).float().sum() / num_steps
        kl = (ratios - 1 - log_ratios).sum() / num_steps
    moments = compute_moments(values, targets.values, num_steps)
    return PPOLosses(total, policy_loss, value_loss, entropy, clip_fraction, kl, moments)
