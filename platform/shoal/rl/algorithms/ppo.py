"""PPO: generalised advantages and the clipped objective (Schulman et al., 1707.06347). See `actor_critic`."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.rl.algorithm_config import PPOConfig
from shoal.rl.algorithms.actor_critic import ActorCriticAlgorithm
from shoal.rl.algorithms.vtrace import VTrace, vtrace


class PPO(ActorCriticAlgorithm):
    """Ratios are clipped around the policy that has acted, of any age."""

    _config: PPOConfig
    _loss_config: PPOConfig

    @staticmethod
    def trace(
        log_rhos_TB: Tensor,
        discounts_TB: Tensor,
        rewards_TB: Tensor,
        values_T1B: Tensor,
        mask_TB: Tensor,
        config: PPOConfig,
    ) -> VTrace:
        """Generalised advantages, equation (16) of 1506.02438: Σ_l (γλ)^l δ_{s+l}.

        V-trace's targets with ρ = c = 1 are the λ-returns, and an advantage is the return without the value.
        """
        on_policy = torch.zeros_like(log_rhos_TB)
        traced = vtrace(on_policy, discounts_TB, rewards_TB, values_T1B, mask_TB, lambda_=config.lambda_)
        return VTrace(traced.targets_TB, traced.targets_TB - values_T1B[:-1])

    @staticmethod
    def gain(log_ratios: Tensor, advantages: Tensor, config: PPOConfig) -> Tensor:
        """The clipped objective, equation (7) of 1707.06347, around the policy μ that has acted, of any age.

        So a step teaches nothing more once π / μ has left the range, and π stays near the policies whose experience is
        on its way. The gradient of a step counts at most ρ̄ times: π / μ is unbounded where the advantage is negative.
        """
        ratios = log_ratios.exp()
        clipped = ratios.clamp(1 - config.clip, 1 + config.clip)
        gains = torch.minimum(ratios * advantages, clipped * advantages)
        return (config.rho_bar / ratios.detach()).clamp(max=1.0) * gains
