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
from shoal.extend.rl import ExperienceBatch, SampleShard, to_observations
from shoal.libs.off_policy.configs import DQNConfig
from shoal.libs.off_policy.q_learning import QLearning, StepLoss, make_ring_options
from shoal.libs.off_policy.q_network import QNetwork
from shoal.libs.off_policy.replay import Replay, ReplaySample, collect_all


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

    network = QNetwork
    model: QNetwork
    _target: QNetwork
    _config: DQNConfig

    def make_replay(self, folder: Path | None) -> Replay:
        return Replay(self._experience, *make_ring_options(self._config, folder, self._config.priority_exponent))

    def make_trial(self, batch: ExperienceBatch) -> SampleShard:
        arrays = collect_all(batch, self._config.num_steps, self._config.discount).to_arrays()
        return SampleShard(self.normalizer.apply(arrays), 0, 1, 1)

    def insert(self, batch: ExperienceBatch, replay: Replay) -> None:
        _, errors = self.learn(self.make_trial(batch), is_trial=True)
        replay.insert(batch, errors)

    def count_draws(self) -> float:
        return self._config.batch_size

    def draw(self) -> tuple[np.ndarray, SampleShard]:
        config = self._config
        arrays = self.draw_arrays(
            config.batch_size,
            lambda replay, num: replay.sample(num, config.num_steps, config.discount, config.beta).to_arrays(),
        )
        return arrays["rows"], SampleShard(self.normalizer.apply(arrays), 0, config.batch_size, config.batch_size)

    def compute_loss(self, share: SampleShard) -> StepLoss:
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
