"""PPO: several steps of the optimizer on each batch, by the clipped objective (Schulman et al., 1707.06347).

Actors may lag behind: ratios are clipped around the policy that has acted. Knows no clock, run or Ray.
Legend: N steps; T steps of the longest of B segments; `mask` is 1 on real steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.models.action_distribution import Categorical, MultiCategorical, SquashedGaussian, mask_logits
from shoal.rl.algorithm_config import PPOConfig
from shoal.rl.algorithms.actor_critic import ActorCriticAlgorithm, Losses, find_non_finite
from shoal.rl.algorithms.algorithm import Metrics
from shoal.rl.algorithms.segments import (
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


class PPOTargets(NamedTuple):
    """Of each step: log μ(a|x) of the policy μ that has acted; by the weights before the batch, advantages and value
    targets; all [N]."""

    log_probabilities: Tensor
    advantages: Tensor
    values: Tensor

    def select(self, chosen: Tensor) -> PPOTargets:
        """Select those of some steps."""
        return PPOTargets(*(each[chosen] for each in self))


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
    scale: float | Tensor = 1.0,
) -> Losses:
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
    value_loss = 0.5 * ((values - targets.values) / scale).square().sum() / num_steps
    total = policy_loss + config.value_cost * value_loss - config.entropy_cost * entropy
    with torch.no_grad():
        clip_fraction = ((ratios - 1).abs() > config.clip).float().sum() / num_steps
        clipped_rhos = (ratios > config.rho_bar).sum() / num_steps
        kl = (ratios - 1 - log_ratios).sum() / num_steps
    moments = compute_moments(values, targets.values, num_steps)
    return Losses(total, policy_loss, value_loss, entropy, clip_fraction, clipped_rhos, kl, moments)


class PPO(ActorCriticAlgorithm):
    """`epochs` times over the steps of each batch, in `minibatches` at random: of steps, or of whole segments where the
    policy is recurrent."""

    adam_epsilon = 1e-5
    _config: PPOConfig
    _loss_config: PPOConfig

    def update(self, batch: ExperienceBatch) -> Iterator[Metrics]:
        tensors = to_tensors(batch, self.device)
        step_rows, targets = self._prepare(tensors, self.group)
        positions, num_steps = self.group.locate(batch)
        self.count_learnt(num_steps)
        if tensors.states is not None:
            for is_mine, num_steps in self.draw_segments(batch):
                yield self._step_on_segments(batch, is_mine, targets, num_steps)
            return
        index_of_position = torch.full((num_steps,), -1).index_copy_(0, positions, torch.arange(len(positions)))
        for _ in range(self.count_epochs(num_steps)):
            for minibatch in torch.randperm(num_steps).tensor_split(self.count_minibatches(num_steps)):
                mine = index_of_position[minibatch]  # -1: another learner has the step
                chosen = mine[mine >= 0].to(self.device)
                rows = step_rows[chosen]
                outputs, values = self.model(tensors.observations[rows])
                outputs = mask_logits(outputs, None if tensors.masks is None else tensors.masks[rows])
                actions, selected = tensors.actions[chosen], targets.select(chosen)
                yield self._step(outputs, values, actions, selected, len(minibatch))

    def is_usable(self, segment: ExperienceBatch) -> bool:
        tensors = to_tensors(segment, self.device)
        step_rows, targets = self._prepare(tensors)
        outputs, values = (each[step_rows] for each in evaluate_rows(self.model, tensors))
        losses = ppo_loss(outputs, values, tensors.actions, targets, self._config, self.model.distribution)
        return not find_non_finite(self.compute_gradients(losses, len(step_rows), len(step_rows), SINGLE))

    @torch.no_grad()
    def _prepare(self, batch: SegmentBatch, group: LearnerGroup = SINGLE) -> tuple[Tensor, PPOTargets]:
        """The observation's row of each step, and its targets."""
        grid = make_grid(batch.lengths_B)
        _, values = evaluate_rows(self.model, batch)
        discounts = get_discounts(batch, self._config.discount)
        per_step = torch.stack([discounts, batch.rewards, torch.ones_like(batch.rewards)])
        discounts_TB, rewards_TB, mask_TB = grid.spread(per_step)
        advantages_TB = estimate_advantages(
            discounts_TB, rewards_TB, grid.spread_rows(values), mask_TB, self._config.lambda_
        )
        advantages = grid.collect(advantages_TB)
        targets = advantages + values[grid.step_rows]
        is_normalized = self._config.normalize_advantages
        advantages = standardize(advantages, group) if is_normalized else advantages / self.value_scale
        return grid.step_rows, PPOTargets(batch.log_probabilities, advantages, targets)

    def _step_on_segments(
        self, batch: ExperienceBatch, is_mine: np.ndarray, targets: PPOTargets, num_steps: int
    ) -> Metrics:
        """A step on a minibatch of `num_steps`, of which this learner has the segments where `is_mine` (bool [s]) is
        true: perhaps none, and then its gradients are 0. Each is unrolled from its stored state."""
        unrolled = is_mine if is_mine.any() else np.arange(len(is_mine)) == 0
        selected = to_tensors(batch.select(unrolled), self.device)
        rows = make_grid(selected.lengths_B).step_rows
        outputs, values = (each[rows] for each in evaluate_rows(self.model, selected))
        chosen = torch.from_numpy(np.flatnonzero(np.repeat(is_mine, batch.lengths))).to(self.device)
        mine = slice(len(chosen))
        return self._step(outputs[mine], values[mine], selected.actions[mine], targets.select(chosen), num_steps)

    def _step(self, outputs: Tensor, values: Tensor, actions: Tensor, targets: PPOTargets, num_steps: int) -> Metrics:
        """A step on some of the `num_steps` of a minibatch, of which the other learners have the others."""
        distribution, scale = self.model.distribution, self.value_scale
        losses = ppo_loss(outputs, values, actions, targets, self._loss_config, distribution, num_steps, scale)
        return self.take_step(self.compute_gradients(losses, len(actions), num_steps, self.group))
