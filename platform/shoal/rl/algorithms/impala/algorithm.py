"""IMPALA: one learner, many actors that lag behind it (Espeholt et al., arXiv:1802.01561).

Read top to bottom: the loss as a pure function, one update, the algorithm as the learner knows it; the configuration is
in `config`. Knows no clock, device, run or Ray.
Legend: N steps, S segments laid end to end, B = S segments padded to T = the longest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.models.actor_critic import ActorCritic
from shoal.rl.algorithms.algorithm import Algorithm, Metrics, NonFiniteLoss
from shoal.rl.algorithms.impala.config import ImpalaConfig
from shoal.rl.algorithms.segments import SegmentBatch, get_discounts, make_grid, to_tensors
from shoal.rl.algorithms.vtrace import vtrace
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.spec import RLSpec, network_kwargs
from shoal.wire import ExperienceSpec


class Losses(NamedTuple):
    """Scalars; `total` is minimised, means over the N steps."""

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor


def impala_loss(logits: Tensor, values: Tensor, batch: SegmentBatch, config: ImpalaConfig) -> Losses:
    """The loss of §4.2: policy gradient with V-trace advantages, squared error to V-trace targets, entropy bonus.

    logits [N+S, num_actions] and values [N+S] are the learner's, for every observation; differentiable in both.
    """
    grid = make_grid(batch.lengths_B)
    log_policy = torch.log_softmax(logits.index_select(0, grid.step_rows), -1)
    log_pi = log_policy.gather(-1, batch.actions.unsqueeze(-1)).squeeze(-1)
    entropy = -(log_policy.exp() * log_policy).sum(-1).mean()

    discounts = get_discounts(batch, config.discount)
    per_step = torch.stack(
        [log_pi.detach() - batch.log_probabilities, discounts, batch.rewards, torch.ones_like(batch.rewards)]
    )
    values_T1B = grid.spread_rows(values.detach())
    log_rhos_TB, discounts_TB, rewards_TB, mask_TB = grid.spread(per_step)
    trace = vtrace(
        log_rhos_TB, discounts_TB, rewards_TB, values_T1B, mask_TB, config.rho_bar, config.c_bar, config.lambda_
    )
    advantages = grid.collect(trace.advantages_TB)
    if config.normalize_advantages:
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    policy_loss = -(advantages * log_pi).mean()
    value_loss = 0.5 * (grid.collect(trace.targets_TB) - values.index_select(0, grid.step_rows)).square().mean()
    total = policy_loss + config.value_cost * value_loss - config.entropy_cost * entropy
    return Losses(total, policy_loss, value_loss, entropy)


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: SegmentBatch, config: ImpalaConfig
) -> dict[str, float]:
    """One gradient step on `batch`. Returns metrics. Raises NonFiniteLoss, leaving the weights as they were."""
    metrics = _compute_gradients(model, batch, config)
    bad = [name for name, value in metrics.items() if not np.isfinite(value)]
    if bad:
        raise NonFiniteLoss(f"{', '.join(bad)} is not finite; lower algorithm.learning_rate or check the rewards")
    optimizer.step()
    return metrics


def has_finite_loss(model: nn.Module, batch: SegmentBatch, config: ImpalaConfig) -> bool:
    """Whether `update` could learn from `batch`; the weights stay unchanged."""
    return bool(np.isfinite(list(_compute_gradients(model, batch, config).values())).all())


def _compute_gradients(model: nn.Module, batch: SegmentBatch, config: ImpalaConfig) -> dict[str, float]:
    """Store the clipped gradients of the loss in the model; returns an update's metrics."""
    logits, values = model(batch.observations)
    losses = impala_loss(logits, values, batch, config)
    model.zero_grad(set_to_none=True)
    losses.total.backward()
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    return {
        "learner/loss": losses.total.item(),
        "learner/policy_loss": losses.policy.item(),
        "learner/value_loss": losses.value.item(),
        "learner/entropy": losses.entropy.item(),
        "learner/grad_norm": grad_norm.item(),
    }


class Impala(Algorithm):
    """One step of Adam for each batch."""

    def __init__(self, spec: RLSpec, experience: ExperienceSpec) -> None:
        assert isinstance(spec.algorithm, ImpalaConfig)
        self._config = spec.algorithm
        self.model: ActorCritic = ActorCritic(**network_kwargs(spec, experience))
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=self._config.learning_rate, fused=True)

    def update(self, batch: ExperienceBatch) -> Iterator[Metrics]:
        yield update(self.model, self._optimizer, to_tensors(batch), self._config)

    def is_usable(self, segment: ExperienceBatch) -> bool:
        return has_finite_loss(self.model, to_tensors(segment), self._config)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:  # restored with the old rate; the spec may have another
            group["lr"] = self._config.learning_rate
