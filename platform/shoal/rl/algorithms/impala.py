"""IMPALA: one learner, many actors that lag behind it (Espeholt et al., arXiv:1802.01561).

Read top to bottom: the loss as a pure function, then the algorithm as the learner knows it. Knows no clock, run or Ray.
Legend: N steps, S segments laid end to end, B = S segments padded to T = the longest one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from shoal.models.action_distribution import Categorical, MultiCategorical, SquashedGaussian
from shoal.rl.algorithm_config import ImpalaConfig
from shoal.rl.algorithms.actor_critic import ActorCriticAlgorithm, Losses, find_non_finite
from shoal.rl.algorithms.algorithm import Metrics
from shoal.rl.algorithms.segments import (
    MOMENTS,
    SegmentBatch,
    compute_moments,
    evaluate_rows,
    get_discounts,
    make_grid,
    to_tensors,
)
from shoal.rl.algorithms.vtrace import vtrace
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.learner_group import SINGLE, LearnerGroup, standardize


def impala_loss(
    outputs: Tensor,
    values: Tensor,
    batch: SegmentBatch,
    config: ImpalaConfig,
    distribution: Categorical | MultiCategorical | SquashedGaussian,
    num_steps: int | None = None,
    group: LearnerGroup = SINGLE,
    scale: float | Tensor = 1.0,
) -> Losses:
    """The loss of §4.2: policy gradient with V-trace advantages, squared error to V-trace targets, entropy bonus.

    A step beyond 1 ± ε in the direction of its advantage has no policy gradient (the trust region of PPO, 1707.06347):
    ρ = 1 would push it on with each step of the optimizer until the effect of the first is seen.

    outputs [N+S, ...] of the distribution and values [N+S] are the learner's, for every observation; differentiable in
    both. num_steps: of the `group` of learners, if the batch is a share of one
    """
    num_steps = num_steps or len(batch.rewards)
    grid = make_grid(batch.lengths_B)
    log_pi, entropies = distribution.evaluate(outputs.index_select(0, grid.step_rows), batch.actions)
    entropy = entropies.sum() / num_steps

    discounts = get_discounts(batch, config.discount)
    log_ratios = log_pi.detach() - batch.log_probabilities
    per_step = torch.stack([log_ratios, discounts, batch.rewards, torch.ones_like(batch.rewards)])
    values_T1B = grid.spread_rows(values.detach())
    log_rhos_TB, discounts_TB, rewards_TB, mask_TB = grid.spread(per_step)
    trace = vtrace(
        log_rhos_TB, discounts_TB, rewards_TB, values_T1B, mask_TB, config.rho_bar, config.c_bar, config.lambda_
    )
    advantages = grid.collect(trace.advantages_TB)
    advantages = standardize(advantages, group) if config.normalize_advantages else advantages / scale
    ratios = log_ratios.exp()
    is_clipped = torch.where(advantages > 0, ratios > 1 + config.clip, ratios < 1 - config.clip)
    policy_loss = -(advantages * ~is_clipped * log_pi).sum() / num_steps
    targets, values = grid.collect(trace.targets_TB), values.index_select(0, grid.step_rows)
    value_loss = 0.5 * ((targets - values) / scale).square().sum() / num_steps
    total = policy_loss + config.value_cost * value_loss - config.entropy_cost * entropy
    moments = compute_moments(values, targets, num_steps)
    kl = (ratios - 1 - log_ratios).sum() / num_steps
    clipped, clipped_rhos = (each.sum() / num_steps for each in (is_clipped, ratios > config.rho_bar))
    return Losses(total, policy_loss, value_loss, entropy, clipped, clipped_rhos, kl, moments)


class Impala(ActorCriticAlgorithm):
    """`epochs` times over the segments of each batch, in minibatches of whole segments at random: V-trace computes
    advantages and targets anew for each."""

    _config: ImpalaConfig
    _loss_config: ImpalaConfig

    def update(self, batch: ExperienceBatch) -> Iterator[Metrics]:
        self.count_learnt(self.group.locate(batch)[1])
        for is_mine, num_steps in self.draw_segments(batch):
            yield self.take_step(self._compute_metrics(batch, is_mine, num_steps, self.group))

    def is_usable(self, segment: ExperienceBatch) -> bool:
        everything = np.ones(len(segment.lengths), np.bool_)
        return not find_non_finite(self._compute_metrics(segment, everything, segment.num_steps, SINGLE))

    def _compute_metrics(
        self, batch: ExperienceBatch, is_mine: np.ndarray, num_steps: int, group: LearnerGroup
    ) -> dict[str, float]:
        """Of a minibatch of `num_steps`, of which this learner has the segments where `is_mine` (bool [s]) is true:
        perhaps none, and then its gradients are 0."""
        has_any = bool(is_mine.any())
        mine = batch.select(is_mine if has_any else np.arange(len(is_mine)) == 0)
        tensors, config = to_tensors(mine, self.device), self._loss_config
        outputs, values = evaluate_rows(self.model, tensors)
        if has_any:
            distribution, scale = self.model.distribution, self.value_scale
            losses = impala_loss(outputs, values, tensors, config, distribution, num_steps, group, scale)
        else:
            if config.normalize_advantages:
                standardize(values.new_zeros(0), group)
            nothing = 0 * (outputs.sum() + values.sum())
            losses = Losses._make([nothing] * len(Losses._fields))._replace(moments=nothing.expand(len(MOMENTS)))
        return self.compute_gradients(losses, mine.num_steps * has_any, num_steps, group)
