"""DQN with the parts that last: n-step double targets, dueling, prioritised replay, an ε of each actor (1803.00933).

Read top to bottom: targets and loss as pure functions, then the algorithm. Legend: B steps of a sample, A actions.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.extend.models import mask_logits
from shoal.extend.rl import (
    ExperienceBatch,
    NonFiniteLoss,
    Normalizer,
    RLSpec,
    SampleShare,
    find_device,
    network_kwargs,
    to_observations,
)
from shoal.libs.off_policy.configs import DQNConfig
from shoal.libs.off_policy.q_learning import QLearning, StepLoss, make_ring_options
from shoal.libs.off_policy.q_network import QNetwork
from shoal.libs.off_policy.replay import ObservationRows, Replay, ReplaySample, sum_returns
from shoal.wire import ExperienceSpec
from shoal.wire.action_masks import MASKS


class DQNLosses(NamedTuple):
    """`total` is minimised; errors [B] are the targets' distances, for the priorities."""

    total: Tensor
    errors: Tensor


def double_targets(returns: Tensor, discounts: Tensor, next_q: Tensor, next_target_q: Tensor) -> Tensor:
    """n-step targets of double DQN (van Hasselt et al., 1509.06461, equation 4; 1803.00933, §3.1). [B]

    returns and discounts [B] are of n steps, or of fewer at the end of a segment; a discount is 0 after termination.
    next_q, next_target_q [B, A]: by the learned network, which chooses the action, and by the target network.
    """
    chosen = next_q.argmax(-1, keepdim=True)
    return returns + discounts * next_target_q.gather(-1, chosen).squeeze(-1)


def dqn_loss(q: Tensor, actions: Tensor, targets: Tensor, weights: Tensor, delta: float) -> DQNLosses:
    """The Huber loss of the values q [B, A] of `actions` [B], weighted [B]; differentiable in q.

    Divided by `delta`, from which on it is linear: so gradients are at most 1, as with Nature's clipped errors.
    """
    values = q.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    per_step = nn.functional.huber_loss(values, targets, reduction="none", delta=delta) / delta
    return DQNLosses(torch.mean(weights * per_step), (targets - values).detach())


class DQN(QLearning[Replay]):
    """Steps of Adam on `batch_size` drawn steps."""

    model: QNetwork
    _target: QNetwork

    def __init__(
        self, spec: RLSpec, experience: ExperienceSpec, folder: Path | None = None, has_replay: bool = True
    ) -> None:
        assert isinstance(spec.algorithm, DQNConfig)
        self._config = config = spec.algorithm
        self.device, self.normalizer = find_device(spec), Normalizer(spec, experience)
        model: QNetwork = QNetwork(**network_kwargs(spec, experience)).to(self.device)
        self._experience = experience
        super().__init__(config, model, self.make_replay(folder) if has_replay else None)

    def make_replay(self, folder: Path | None) -> Replay:
        return Replay(self._experience, *make_ring_options(self._config, folder, self._config.priority_exponent))

    def is_usable(self, segment: ExperienceBatch) -> bool:
        return bool(np.isfinite(self._compute_errors(segment)).all())

    def insert(self, batch: ExperienceBatch, replay: Replay) -> None:
        errors = self._compute_errors(batch)
        if not np.isfinite(errors).all():
            raise NonFiniteLoss("the error of a step is not finite; check the rewards")
        replay.insert(batch, errors)

    def count_draws(self) -> float:
        return self._config.batch_size

    def draw(self) -> tuple[np.ndarray, SampleShare]:
        config = self._config
        arrays = self.draw_arrays(
            config.batch_size,
            lambda replay, num: replay.sample(num, config.num_steps, config.discount, config.beta).to_arrays(),
        )
        return arrays["rows"], SampleShare(self.normalizer.apply(arrays), 0, config.batch_size, config.batch_size)

    def compute_loss(self, share: SampleShare) -> StepLoss:
        sample = ReplaySample(**share.arrays)
        q = self.model(to_observations(sample.observations, self.device))
        actions, weights = self.to_device(sample.actions), self.to_device(sample.weights)
        losses = dqn_loss(q, actions, self._compute_targets(sample), weights, self._config.huber_delta)
        return StepLoss(losses.total, len(q), losses.errors, q.detach().mean(-1))

    @torch.no_grad()
    def _compute_targets(self, sample: ReplaySample) -> Tensor:
        following = to_observations(sample.next_observations, self.device)
        returns, discounts = self.to_device(sample.returns), self.to_device(sample.discounts)
        masks = None if sample.next_masks is None else self.to_device(sample.next_masks)
        next_q = mask_logits(self.model(following), masks)
        return double_targets(returns, discounts, next_q, self._target(following))

    @torch.no_grad()
    def _compute_errors(self, batch: ExperienceBatch) -> np.ndarray:
        """The error of each step of a new batch, for its first priority, as Ape-X's actors compute it (§3). [N]"""
        batch = self.normalizer.normalize(batch)
        rows = ObservationRows.from_batch(batch)
        step_rows = np.flatnonzero(rows.is_step)
        returns, discounts, following = sum_returns(rows, step_rows, self._config.num_steps, self._config.discount)
        observations = to_observations(batch.observations, self.device)
        q, target_q = self.model(observations), self._target(observations)
        masks = batch.extras.get(MASKS)
        next_q = mask_logits(q[following], None if masks is None else self.to_device(masks[following]))
        returns_N, discounts_N = self.to_device(returns), self.to_device(discounts)
        targets = double_targets(returns_N, discounts_N, next_q, target_q[following])
        values = q[step_rows, self.to_device(np.array(batch.actions))]
        errors: np.ndarray = (targets - values).cpu().numpy()
        return errors
