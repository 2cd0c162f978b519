"""PPO: several steps of the optimiser on each batch, by the clipped objective (Schulman et al., 1707.06347).

Actors may lag behind: by the decoupled objective (Hilton et al., 2110.00641) ratios are clipped around the weights
before the batch, whatever weights have acted. Knows no clock, device, run or Ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.models.actor_critic import ActorCritic
from shoal.rl.algorithms.algorithm import Algorithm, Metrics, NonFiniteLoss
from shoal.rl.algorithms.ppo.config import PPOConfig
from shoal.rl.algorithms.ppo.loss import PPOTargets, estimate_advantages, ppo_loss
from shoal.rl.algorithms.segments import SegmentBatch, get_discounts, make_grid, to_tensors
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.spec import RLSpec, network_kwargs
from shoal.wire import ExperienceSpec


class PPO(Algorithm):
    """`epochs` times over the steps of each batch, in `minibatches` at random."""

    def __init__(self, spec: RLSpec, experience: ExperienceSpec) -> None:
        assert isinstance(spec.algorithm, PPOConfig)
        self._config = spec.algorithm
        self.model: ActorCritic = ActorCritic(**network_kwargs(spec, experience))
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=self._config.learning_rate, eps=1e-5, fused=True)

    def update(self, batch: ExperienceBatch) -> Iterator[Metrics]:
        tensors = to_tensors(batch)
        step_rows, targets = self._prepare(tensors)
        for _ in range(self._config.epochs):
            for chosen in torch.randperm(len(step_rows)).tensor_split(self._config.minibatches):
                if len(chosen):
                    yield self._step(tensors, step_rows[chosen], chosen, targets)

    def is_usable(self, segment: ExperienceBatch) -> bool:
        tensors = to_tensors(segment)
        step_rows, targets = self._prepare(tensors)
        metrics = self._compute_gradients(tensors, step_rows, torch.arange(len(step_rows)), targets)
        return _find_non_finite(metrics) == []

    @torch.no_grad()
    def _prepare(self, batch: SegmentBatch) -> tuple[Tensor, PPOTargets]:
        """The observation's row of each step, and what the weights before the batch say of it."""
        grid = make_grid(batch.lengths_B)
        logits, values = self.model(batch.observations)
        log_policy = torch.log_softmax(logits[grid.step_rows], -1)
        log_prox = log_policy.gather(-1, batch.actions.unsqueeze(-1)).squeeze(-1)
        discounts = get_discounts(batch, self._config.discount)
        per_step = torch.stack([discounts, batch.rewards, torch.ones_like(batch.rewards)])
        discounts_TB, rewards_TB, mask_TB = grid.spread(per_step)
        advantages_TB = estimate_advantages(
            discounts_TB, rewards_TB, grid.spread_rows(values), mask_TB, self._config.lambda_
        )
        advantages = grid.collect(advantages_TB)
        targets = advantages + values[grid.step_rows]
        if self._config.normalize_advantages:
            advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
        weights = (log_prox - batch.log_probabilities).exp().clamp(max=self._config.rho_bar)
        return grid.step_rows, PPOTargets(log_prox, advantages, targets, weights)

    def _step(self, batch: SegmentBatch, rows: Tensor, chosen: Tensor, targets: PPOTargets) -> Metrics:
        metrics = self._compute_gradients(batch, rows, chosen, targets)
        if bad := _find_non_finite(metrics):
            raise NonFiniteLoss(f"{', '.join(bad)} is not finite; lower algorithm.learning_rate or check the rewards")
        self._optimizer.step()
        return metrics

    def _compute_gradients(self, batch: SegmentBatch, rows: Tensor, chosen: Tensor, targets: PPOTargets) -> Metrics:
        """Store the clipped gradients of the loss over the chosen steps in the model; returns a step's metrics."""
        logits, values = self.model(batch.observations[rows])
        selected = PPOTargets(*(each[chosen] for each in targets))
        losses = ppo_loss(logits, values, batch.actions[chosen], selected, self._config)
        self.model.zero_grad(set_to_none=True)
        losses.total.backward()
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)
        return {
            "learner/loss": losses.total.item(),
            "learner/policy_loss": losses.policy.item(),
            "learner/value_loss": losses.value.item(),
            "learner/entropy": losses.entropy.item(),
            "learner/clip_fraction": losses.clip_fraction.item(),
            "learner/kl": losses.kl.item(),
            "learner/grad_norm": grad_norm.item(),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:  # restored with the old rate; the spec may have another
            group["lr"] = self._config.learning_rate


def _find_non_finite(metrics: Metrics) -> list[str]:
    return [name for name, value in metrics.items() if not torch.isfinite(torch.tensor(value))]
