"""IMPALA: one learner, many actors that lag behind it (Espeholt et al., arXiv:1802.01561).

Read top to bottom: the loss as a pure function, one update, the algorithm as the learner knows it; the configuration is
in `config`. Knows no clock, device, run or Ray.
Legend: N steps, S segments laid end to end, B = S segments padded to T = the longest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.models.action_distribution import Categorical, MultiCategorical, SquashedGaussian
from shoal.models.recurrent_actor_critic import AnyActorCritic
from shoal.rl.algorithm_config import AlgorithmConfig
from shoal.rl.algorithms.algorithm import (
    Algorithm,
    Metrics,
    NonFiniteLoss,
    build_model,
    find_device,
    restore_optimizer,
    set_learning_rate,
)
from shoal.rl.algorithms.impala.config import ImpalaConfig
from shoal.rl.algorithms.normalization import Normalizer
from shoal.rl.algorithms.segments import (
    MOMENTS,
    SegmentBatch,
    compute_log_ratios,
    compute_moments,
    evaluate_rows,
    explain_variance,
    get_discounts,
    make_grid,
    to_tensors,
)
from shoal.rl.algorithms.vtrace import vtrace
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.learner_group import SINGLE, LearnerGroup, standardize
from shoal.rl.spec import RLSpec
from shoal.wire import ExperienceSpec


class Losses(NamedTuple):
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


def impala_loss(
    outputs: Tensor,
    values: Tensor,
    batch: SegmentBatch,
    config: ImpalaConfig,
    distribution: Categorical | MultiCategorical | SquashedGaussian,
    num_steps: int | None = None,
    group: LearnerGroup = SINGLE,
) -> Losses:
    """The loss of §4.2: policy gradient with V-trace advantages, squared error to V-trace targets, entropy bonus.

    Of experience that is k versions old, a step beyond 1 ± ε/k in the direction of its advantage has no policy gradient
    (the trust region of PPO, 1707.06347): ρ = 1 would push it on with each batch until the effect of the first is seen.

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
    if config.normalize_advantages:
        advantages = standardize(advantages, group)
    ratios = log_ratios.exp()
    reach = config.clip / (1 if batch.ages is None else batch.ages.clamp(min=1))
    is_clipped = torch.where(advantages > 0, ratios > 1 + reach, ratios < 1 - reach)
    policy_loss = -(advantages * ~is_clipped * log_pi).sum() / num_steps
    targets, values = grid.collect(trace.targets_TB), values.index_select(0, grid.step_rows)
    value_loss = 0.5 * (targets - values).square().sum() / num_steps
    total = policy_loss + config.value_cost * value_loss - config.entropy_cost * entropy
    moments = compute_moments(values, targets, num_steps)
    kl = (ratios - 1 - log_ratios).sum() / num_steps
    return Losses(total, policy_loss, value_loss, entropy, is_clipped.sum() / num_steps, kl, moments)


def update(
    model: AnyActorCritic,
    optimizer: torch.optim.Optimizer,
    batch: SegmentBatch,
    config: ImpalaConfig,
    num_steps: int | None = None,
    group: LearnerGroup = SINGLE,
) -> dict[str, float]:
    """One gradient step on `batch`, with the `group` of learners that have the other of its `num_steps`.

    Returns metrics. Raises NonFiniteLoss, leaving the weights as they were.
    """
    metrics = _compute_gradients(model, batch, config, num_steps, group)
    bad = [name for name, value in metrics.items() if not np.isfinite(value)]
    if bad:
        raise NonFiniteLoss(f"{', '.join(bad)} is not finite; lower algorithm.learning_rate or check the rewards")
    optimizer.step()
    return metrics


def has_finite_loss(model: AnyActorCritic, batch: SegmentBatch, config: ImpalaConfig) -> bool:
    """Whether `update` could learn from `batch`; the weights stay unchanged."""
    return bool(np.isfinite(list(_compute_gradients(model, batch, config, None, SINGLE).values())).all())


def _compute_gradients(
    model: AnyActorCritic, batch: SegmentBatch, config: ImpalaConfig, num_steps: int | None, group: LearnerGroup
) -> dict[str, float]:
    """Store the clipped gradients of the loss in the model; returns an update's metrics."""
    num_mine = len(batch.rewards)
    outputs, values = evaluate_rows(model, batch)
    losses = impala_loss(outputs, values, batch, config, model.distribution, num_steps, group)
    model.zero_grad(set_to_none=True)
    losses.total.backward()
    metrics = {
        "learner/loss": losses.total,
        "learner/policy_loss": losses.policy,
        "learner/value_loss": losses.value,
        "learner/entropy": losses.entropy,
        "learner/clip_fraction": losses.clip_fraction,
        "learner/kl": losses.kl,
        **dict(zip(MOMENTS, losses.moments, strict=True)),
    }
    found = group.sum_gradients(model.parameters(), metrics, num_mine, num_steps or num_mine)
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    explained = explain_variance(*(found.pop(each) for each in MOMENTS))
    return {**found, "learner/explained_variance": explained, "learner/grad_norm": grad_norm.item()}


class Impala(Algorithm):
    """One step of Adam for each batch."""

    def __init__(self, spec: RLSpec, experience: ExperienceSpec, folder: Path | None = None) -> None:
        assert isinstance(spec.algorithm, ImpalaConfig)
        self._config = spec.algorithm
        self.device, self.normalizer = find_device(spec), Normalizer(spec, experience)
        self.model: AnyActorCritic = build_model(spec, experience)
        self.model.to(self.device)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=self._config.learning_rate, fused=True)

    def update(self, batch: ExperienceBatch) -> Iterator[Metrics]:
        _, num_steps = self.group.locate(batch)
        tensors = to_tensors(batch, self.device)
        yield update(self.model, self._optimizer, tensors, self._config, num_steps, self.group)

    def is_usable(self, segment: ExperienceBatch) -> bool:
        return has_finite_loss(self.model, to_tensors(segment, self.device), self._config)

    def compute_log_ratios(self, batch: ExperienceBatch) -> np.ndarray:
        return compute_log_ratios(self.model, to_tensors(batch, self.device))

    def configure(self, config: AlgorithmConfig) -> None:
        assert isinstance(config, ImpalaConfig)
        self._config = config
        set_learning_rate(self._optimizer, config.learning_rate)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "normalizer": self.normalizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.normalizer.load_state_dict(state.get("normalizer", {}))
        restore_optimizer(self._optimizer, state["optimizer"], self._config.learning_rate)
