"""PPO: several steps of the optimiser on each batch, by the clipped objective (Schulman et al., 1707.06347).

Actors may lag behind: ratios are clipped around the policy that has acted. Knows no clock, device, run or Ray.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.models.action_distribution import mask_logits
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
from shoal.rl.algorithms.normalization import Normalizer
from shoal.rl.algorithms.ppo.config import PPOConfig
from shoal.rl.algorithms.ppo.loss import PPOTargets, estimate_advantages, ppo_loss
from shoal.rl.algorithms.segments import (
    MOMENTS,
    SegmentBatch,
    compute_log_ratios,
    evaluate_rows,
    explain_variance,
    get_discounts,
    make_grid,
    to_tensors,
)
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.learner_group import SINGLE, LearnerGroup, standardize
from shoal.rl.spec import RLSpec
from shoal.wire import ExperienceSpec


class PPO(Algorithm):
    """`epochs` times over the steps of each batch, in `minibatches` at random: of steps, or of whole segments where the
    policy is recurrent."""

    def __init__(self, spec: RLSpec, experience: ExperienceSpec, folder: Path | None = None) -> None:
        assert isinstance(spec.algorithm, PPOConfig)
        self._config = spec.algorithm
        self.device, self.normalizer = find_device(spec), Normalizer(spec, experience)
        self.model: AnyActorCritic = build_model(spec, experience)
        self.model.to(self.device)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=self._config.learning_rate, eps=1e-5, fused=True)

    def update(self, batch: ExperienceBatch) -> Iterator[Metrics]:
        tensors = to_tensors(batch, self.device)
        step_rows, targets = self._prepare(tensors, self.group)
        positions, num_steps = self.group.locate(batch)
        index_of_position = torch.full((num_steps,), -1).index_copy_(0, positions, torch.arange(len(positions)))
        for _ in range(self._config.epochs):
            if tensors.states is not None:
                segments, lengths = self.group.locate_segments(batch)
                for chosen in torch.randperm(len(lengths)).tensor_split(self._config.minibatches):
                    if len(chosen):
                        is_mine, num_steps = np.isin(segments, chosen.numpy()), int(lengths[chosen.numpy()].sum())
                        yield self._step_on_segments(batch, is_mine, targets, num_steps)
                continue
            for minibatch in torch.randperm(num_steps).tensor_split(self._config.minibatches):
                if len(minibatch):
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
        metrics = self._compute_gradients(outputs, values, tensors.actions, targets, len(step_rows), SINGLE)
        return _find_non_finite(metrics) == []

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
        if self._config.normalize_advantages:
            advantages = standardize(advantages, group)
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
        metrics = self._compute_gradients(outputs, values, actions, targets, num_steps, self.group)
        if bad := _find_non_finite(metrics):
            raise NonFiniteLoss(f"{', '.join(bad)} is not finite; lower algorithm.learning_rate or check the rewards")
        self._optimizer.step()
        return metrics

    def _compute_gradients(
        self,
        outputs: Tensor,
        values: Tensor,
        actions: Tensor,
        targets: PPOTargets,
        num_steps: int,
        group: LearnerGroup,
    ) -> Metrics:
        """Store the clipped gradients of the loss over some steps in the model; returns a step's metrics.

        num_steps: of the minibatch, of which the other learners of the group have the others
        """
        losses = ppo_loss(outputs, values, actions, targets, self._config, self.model.distribution, num_steps)
        self.model.zero_grad(set_to_none=True)
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
        found = group.sum_gradients(self.model.parameters(), metrics, len(actions), num_steps)
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)
        explained = explain_variance(*(found.pop(each) for each in MOMENTS))
        return {**found, "learner/explained_variance": explained, "learner/grad_norm": grad_norm.item()}

    def compute_log_ratios(self, batch: ExperienceBatch) -> np.ndarray:
        return compute_log_ratios(self.model, to_tensors(batch, self.device))

    def configure(self, config: AlgorithmConfig) -> None:
        assert isinstance(config, PPOConfig)
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


def _find_non_finite(metrics: Metrics) -> list[str]:
    return [name for name, value in metrics.items() if not math.isfinite(value)]
