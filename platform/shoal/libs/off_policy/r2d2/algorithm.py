"""R2D2: Q-learning with a recurrent core, from replayed sequences with the state that the actor had before them.

Kapturowski et al., ICLR 2019 (https://openreview.net/forum?id=r1lyTjAqYX). A sequence at the beginning of a segment
starts from its actor's state. Of the others, the learner computes the states from that one when it inserts them. Knows
no clock, device, run or Ray. Legend: K sequences, S the size of a state, U trained steps, R rows of a sequence.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.libs.off_policy.q_learning import QLearning, StepLoss, find_folder, make_random
from shoal.libs.off_policy.q_network import RecurrentQNetwork
from shoal.libs.off_policy.r2d2.config import R2D2Config
from shoal.libs.off_policy.r2d2.loss import R2D2Losses, mix_errors, r2d2_loss, rescaled_targets, sum_rewards
from shoal.libs.off_policy.replay.sequence_replay import (
    SequenceReplay,
    Sequences,
    SequenceShape,
    SequenceStarts,
    find_starts,
    split_segments,
)
from shoal.models.action_distribution import mask_logits
from shoal.rl.algorithms.algorithm import NonFiniteLoss, find_device
from shoal.rl.algorithms.normalization import Normalizer
from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.learner_group import SampleShare
from shoal.rl.spec import RLSpec, network_kwargs
from shoal.wire import ExperienceSpec
from shoal.wire.experience_spec import STATE


class _Evaluation(NamedTuple):
    """losses of sequences, their priorities' errors [K], and the learned network's values [K, U, A]."""

    losses: R2D2Losses
    mixed_errors: Tensor
    q: Tensor


class R2D2(QLearning):
    """Steps of Adam on `batch_size` drawn sequences."""

    model: RecurrentQNetwork
    _target: RecurrentQNetwork
    _replay: SequenceReplay

    def __init__(
        self, spec: RLSpec, experience: ExperienceSpec, folder: Path | None = None, has_replay: bool = True
    ) -> None:
        assert isinstance(spec.algorithm, R2D2Config)
        self._config = config = spec.algorithm
        self._shape = SequenceShape(config.sequence_length, config.burn_in, config.num_steps)
        self.device, self.normalizer = find_device(spec), Normalizer(spec, experience)
        model: RecurrentQNetwork = RecurrentQNetwork(**network_kwargs(spec, experience)).to(self.device)
        replay: SequenceReplay | None = None
        if has_replay:
            replay = SequenceReplay(
                experience,
                self._shape,
                spec.state_size,
                int(config.replay_mb * 2**20),
                config.priority_exponent,
                make_random(),
                find_folder(config, folder),
            )
        super().__init__(config, model, replay)

    def is_usable(self, segment: ExperienceBatch) -> bool:
        with torch.no_grad():
            return bool(self._evaluate(self._normalize(self._split(segment))).mixed_errors.isfinite().all())

    def _insert(self, batch: ExperienceBatch) -> None:
        sequences = self._split(batch)
        with torch.no_grad():
            errors = self._evaluate(self._normalize(sequences)).mixed_errors
        if not errors.isfinite().all():
            raise NonFiniteLoss("the error of a sequence is not finite; check the rewards")
        self._replay.insert(sequences, errors.cpu().numpy())

    def _count_draws(self) -> float:
        return self._config.batch_size * self._replay.num_steps / self._replay.num_drawable

    def _draw(self) -> tuple[np.ndarray, SampleShare]:
        rows, sequences, weights = self._replay.sample(self._config.batch_size, self._config.beta)
        arrays = {**self.normalizer.apply(sequences.to_arrays()), "weights": weights}
        return rows, SampleShare(arrays, 0, len(rows), int(sequences.num_trained.sum()))

    def _compute_loss(self, share: SampleShare) -> StepLoss:
        arrays = dict(share.arrays)
        weights = self.to_device(arrays.pop("weights"))
        sequences = Sequences(**arrays)
        losses, mixed_errors, q = self._evaluate(sequences, weights)
        num_trained = self.to_device(sequences.num_trained)
        is_trained = torch.arange(q.shape[1], device=q.device) < num_trained[:, None]
        values = (q.mean(-1) * is_trained).sum(1) / num_trained
        return StepLoss(losses.total, int(sequences.num_trained.sum()), mixed_errors, values)

    def _split(self, batch: ExperienceBatch) -> Sequences:
        starts = find_starts(batch.lengths, self._shape)
        states = self._compute_states(self.normalizer.normalize(batch), starts)
        return split_segments(batch, starts, states, self._shape)

    def _normalize(self, sequences: Sequences) -> Sequences:
        return Sequences(**self.normalizer.apply(sequences.to_arrays()))

    @torch.no_grad()
    def _compute_states(self, batch: ExperienceBatch, starts: SequenceStarts) -> np.ndarray:
        """The state before the row `state_rows` of each sequence, by the learner's weights. [K, S]"""
        observations = self._to_tensor(batch.observations)
        states = self.to_device(np.array(batch.extras[STATE]))
        offsets = np.cumsum(batch.lengths + 1) - (batch.lengths + 1)
        found, position = states.new_empty(len(starts.segments), states.shape[1]), 0
        for row in np.unique(starts.state_rows):
            chosen = np.flatnonzero(starts.state_rows == row)
            segments = self.to_device(starts.segments[chosen])
            if row > position:
                rows = offsets[starts.segments[chosen]] + np.arange(position, row)[:, None]
                states[segments] = self.model.advance(observations[rows], states[segments])
                position = int(row)
            found[chosen] = states[segments]
        return found.cpu().numpy()

    def _to_tensor(self, observations: np.ndarray) -> Tensor:
        """float32, in memory of its own; frames of bytes stay uint8."""
        is_bytes = self.model.encoder is not None and observations.dtype == np.uint8
        return self.to_device(np.array(observations, np.uint8 if is_bytes else np.float32))

    def _evaluate(self, sequences: Sequences, weights: Tensor | None = None) -> _Evaluation:
        config = self._config
        num_trained, num_steps = self.to_device(sequences.num_trained), self.to_device(sequences.num_steps)
        longest, most_trained = int(num_steps.max()), int(num_trained.max())  # later rows are padding in all of them
        rewards = self.to_device(sequences.rewards[:, : most_trained + config.num_steps - 1])
        terminated = self.to_device(sequences.terminated)
        returns, discounts, following = sum_rewards(rewards, num_steps, terminated, config.num_steps, config.discount)
        q = self._unroll(self.model, sequences, longest + 1)
        with torch.no_grad():
            target_q = self._unroll(self._target, sequences, longest + 1)
            index = following[..., None].expand(-1, -1, q.shape[-1])
            next_q, next_target_q = q.gather(1, index), target_q.gather(1, index)
            if sequences.masks is not None:
                next_q = mask_logits(next_q, self.to_device(sequences.masks).gather(1, index))
            targets = rescaled_targets(returns, discounts, next_q, next_target_q, config.rescaling_epsilon)
        q = q[:, :most_trained]
        actions = self.to_device(sequences.actions[:, :most_trained])
        losses = r2d2_loss(q, actions, targets, num_trained, q.new_ones(len(q)) if weights is None else weights)
        return _Evaluation(losses, mix_errors(losses.errors, num_trained, config.priority_mix), q.detach())

    def _unroll(self, network: RecurrentQNetwork, sequences: Sequences, num_rows: int) -> Tensor:
        """Values [K, num_rows, A] from the first trained step on. The burn-in has no gradient (§3)."""
        burn_in = self._config.burn_in
        observations = self._to_tensor(sequences.observations[:, : burn_in + num_rows]).transpose(0, 1)
        state, has_burn_in = self.to_device(np.array(sequences.states)), self.to_device(sequences.has_burn_in)
        if sequences.has_burn_in.any():
            with torch.no_grad():
                state[has_burn_in] = network.advance(observations[:burn_in, has_burn_in], state[has_burn_in])
        q, _ = network(observations[burn_in:], state)
        values: Tensor = q.transpose(0, 1)
        return values
