"""IMPALA: V-trace and its policy gradient (Espeholt et al., arXiv:1802.01561). See `actor_critic`."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.rl.algorithm_config import ImpalaConfig
from shoal.rl.algorithms.actor_critic import ActorCriticAlgorithm
from shoal.rl.algorithms.vtrace import VTrace, vtrace


class Impala(ActorCriticAlgorithm):
    """V-trace computes targets and advantages once for a batch, by the weights before it."""

    _config: ImpalaConfig
    _loss_config: ImpalaConfig

    @staticmethod
    def trace(
        log_rhos_TB: Tensor,
        discounts_TB: Tensor,
        rewards_TB: Tensor,
        values_T1B: Tensor,
        mask_TB: Tensor,
        config: ImpalaConfig,
    ) -> VTrace:
        levels = (config.rho_bar, config.c_bar, config.lambda_)
        return vtrace(log_rhos_TB, discounts_TB, rewards_TB, values_T1B, mask_TB, *levels)

    @staticmethod
    def gain(log_ratios: Tensor, advantages: Tensor, config: ImpalaConfig) -> Tensor:
        """Of the policy gradient of §4.2, A log π; none beyond 1 ± ε in the direction of the advantage.

        That is the trust region of PPO (1707.06347): ρ = 1 would push a step on with each step of the optimizer.
        """
        ratios = log_ratios.detach().exp()
        is_clipped = torch.where(advantages > 0, ratios > 1 + config.clip, ratios < 1 - config.clip)
        return advantages * ~is_clipped * log_ratios
