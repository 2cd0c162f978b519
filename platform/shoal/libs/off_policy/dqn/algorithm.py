"""DQN: each batch goes into a prioritised replay of steps, from which every step of the optimizer draws.

Knows no clock, device, run or Ray.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal.libs.off_policy.dqn.config import DQNConfig
from shoal.libs.off_policy.dqn.loss import double_targets, dqn_loss
from shoal.libs.off_policy.q_learning import QLearning, StepLoss, find_folder, make_random
from shoal.libs.off_policy.q_network import QNetwork
from shoal.libs.off_policy.replay.replay import Replay, ReplaySample, SegmentRows, sum_returns
from shoal.models.action_distribution import mask_logits
from shoal.rl.algorithms.algorithm import NonFiniteLoss, find_device
from shoal.rl.algorithms.normalization import Normalizer
from shoal.rl.algorithms.segments import to_observations
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.learner_group import SampleShare
from shoal.rl.spec import RLSpec, network_kwargs
from shoal.wire import ExperienceSpec
from shoal.wire.action_masks import MASKS


class DQN(QLearning):
    """Steps of Adam on `batch_size` drawn steps."""

    model: QNetwork
    _target: QNetwork
    _replay: Replay

    def __init__(
        self, spec: RLSpec, experience: ExperienceSpec, folder: Path | None = None, has_replay: bool = True
    ) -> None:
        assert isinstance(spec.algorithm, DQNConfig)
        self._config = config = spec.algorithm
        self.device, self.normalizer = find_device(spec), Normalizer(spec, experience)
        model: QNetwork = QNetwork(**network_kwargs(spec, experience)).to(self.device)
        size_bytes, exponent, place = (
            int(config.replay_mb * 2**20),
            config.priority_exponent,
            find_folder(config, folder),
        )
        replay = Replay(experience, size_bytes, exponent, make_random(), place) if has_replay else None
        super().__init__(config, model, replay)

    def is_usable(self, segment: ExperienceBatch) -> bool:
        return bool(np.isfinite(self._compute_errors(segment)).all())

    def _insert(self, batch: ExperienceBatch) -> None:
        errors = self._compute_errors(batch)
        if not np.isfinite(errors).all():
            raise NonFiniteLoss("the error of a step is not finite; check the rewards")
        self._replay.insert(batch, errors)

    def _count_draws(self) -> float:
        return self._config.batch_size

    def _draw(self) -> tuple[np.ndarray, SampleShare]:
        config = self._config
        sample = self._replay.sample(config.batch_size, config.num_steps, config.discount, config.beta)
        arrays = self.normalizer.apply(sample.to_arrays())
        return sample.rows, SampleShare(arrays, 0, config.batch_size, config.batch_size)

    def _compute_loss(self, share: SampleShare) -> StepLoss:
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
        rows = SegmentRows.of(batch)
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
