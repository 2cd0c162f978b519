"""R2D2: Q-learning with a recurrent core, from replayed sequences with the state that the actor had before them.

Kapturowski et al., ICLR 2019 (https://openreview.net/forum?id=r1lyTjAqYX). A sequence at the beginning of a segment
starts from its actor's state. Of the others, the learner computes the states from that one when it inserts them. Read
top to bottom: rescaling, targets, loss and priorities as pure functions, then the algorithm. Legend: K (of a sample: B)
sequences, S the size of a state, U trained steps, R rows of a sequence, n steps of a target, A actions.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.extend.models import mask_logits
from shoal.extend.rl import ExperienceBatch, RLSpec, SampleShard
from shoal.libs.off_policy.configs import R2D2Config
from shoal.libs.off_policy.q_learning import QLearning, StepLoss, make_ring_options
from shoal.libs.off_policy.q_network import RecurrentQNetwork, invert_rescaling
from shoal.libs.off_policy.sequence_replay import (
    SequenceReplay,
    Sequences,
    SequenceShape,
    SequenceStarts,
    find_starts,
    split_segments,
)
from shoal.wire import ExperienceSpec
from shoal.wire.experience_spec import STATE


class R2D2Losses(NamedTuple):
    """`total` is minimised; errors [B, U] are the targets' distances, on the rescaled scale, 0 on padding."""

    total: Tensor
    errors: Tensor


class StepReturns(NamedTuple):
    """Of up to n steps from each step [B, U]: their discounted rewards; γ to their number, 0 if the last terminated the
    episode; and the row of the observation after them, from the first step's on."""

    returns: Tensor
    discounts: Tensor
    following: Tensor


def rescale(x: Tensor, epsilon: float) -> Tensor:
    """h(x) = sign(x) (√(|x| + 1) - 1) + ε x (§2.3; Pohlen et al., 1805.11593, proposition A.2)."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + epsilon * x


def sum_rewards(rewards: Tensor, num_steps: Tensor, terminated: Tensor, n: int, discount: float) -> StepReturns:
    """n-step returns of U steps. rewards [B, U+n-1]; num_steps [B] of them exist; `terminated` [B] by the last."""
    windows = rewards.unfold(1, n, 1)  # [B, U, n]
    steps = torch.arange(windows.shape[1], device=windows.device)
    num_left = num_steps[:, None] - steps
    num_taken = num_left.clamp(0, n)
    offsets = torch.arange(n, device=rewards.device)
    factors = torch.where(offsets < num_taken[..., None], float(discount) ** offsets, 0.0)
    is_terminal = terminated[:, None] & (num_taken == num_left)
    discounts = torch.where(is_terminal, 0.0, float(discount) ** num_taken)
    return StepReturns((factors * windows).sum(-1), discounts.to(rewards.dtype), steps + num_taken)


def rescaled_targets(
    returns: Tensor, discounts: Tensor, next_q: Tensor, next_target_q: Tensor, epsilon: float
) -> Tensor:
    """h(returns + discounts · h⁻¹(Q̄(s', argmax Q(s', ·)))): n-step double targets (§2.3). [B, U]

    next_q, next_target_q [B, U, A]: by the learned network, which chooses the action, and by the target network.
    """
    chosen = next_q.argmax(-1, keepdim=True)
    values = invert_rescaling(next_target_q.gather(-1, chosen).squeeze(-1), epsilon)
    return rescale(returns + discounts * values, epsilon)


def r2d2_loss(q: Tensor, actions: Tensor, targets: Tensor, num_trained: Tensor, weights: Tensor) -> R2D2Losses:
    """Half the squared error of the values q [B, U, A] of `actions` [B, U], weighted [B]; differentiable in q.

    The mean is over all trained steps, of which sequence b has the first num_trained[b]: each weighs the same.
    """
    is_trained = torch.arange(q.shape[1], device=q.device) < num_trained[:, None]
    values = q.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    errors = torch.where(is_trained, targets - values, 0.0)
    total = (weights[:, None] * errors.square()).sum() / (2 * is_trained.sum())
    return R2D2Losses(total, errors.detach())


def mix_errors(errors: Tensor, num_trained: Tensor, mix: float) -> Tensor:
    """η max + (1 - η) mean of the absolute errors of each sequence's trained steps (§2.3). [B]; errors [B, U] are 0 on
    padding."""
    magnitudes = errors.abs()
    return mix * magnitudes.amax(1) + (1 - mix) * magnitudes.sum(1) / num_trained


class _Evaluation(NamedTuple):
    """losses of sequences, their priorities' errors [K], and the learned network's values [K, U, A]."""

    losses: R2D2Losses
    mixed_errors: Tensor
    q: Tensor


class R2D2(QLearning[SequenceReplay]):
    """Steps of Adam on `batch_size` drawn sequences."""

    network = RecurrentQNetwork
    model: RecurrentQNetwork
    _target: RecurrentQNetwork
    _config: R2D2Config

    def __init__(
        self, spec: RLSpec, experience: ExperienceSpec, folder: Path | None = None, has_replay: bool = True
    ) -> None:
        config = spec.algorithm
        assert isinstance(config, R2D2Config)
        self._shape = SequenceShape(config.sequence_length, config.burn_in, config.num_steps)
        self._state_size = spec.state_size
        super().__init__(spec, experience, folder, has_replay)

    def make_replay(self, folder: Path | None) -> SequenceReplay:
        options = make_ring_options(self._config, folder, self._config.priority_exponent)
        return SequenceReplay(self._experience, self._shape, self._state_size, *options)

    def make_trial(self, batch: ExperienceBatch) -> SampleShard:
        return self._make_trial(self._split(batch))

    def insert(self, batch: ExperienceBatch, replay: SequenceReplay) -> None:
        sequences = self._split(batch)
        _, errors = self.learn(self._make_trial(sequences), is_trial=True)
        replay.insert(sequences, errors)

    def _make_trial(self, sequences: Sequences) -> SampleShard:
        weights = np.ones(len(sequences.states), np.float32)
        return SampleShard(self.normalizer.apply(sequences.to_arrays() | {"weights": weights}), 0, 1, 1)

    def count_draws(self) -> float:
        return self._config.batch_size * self._replay.num_steps / self._replay.num_drawable

    def draw(self) -> tuple[np.ndarray, SampleShard]:
        arrays = self.draw_arrays(self._config.batch_size, self._draw_sequences)
        rows, num_steps = arrays.pop("rows"), int(arrays["num_trained"].sum())
        return rows, SampleShard(self.normalizer.apply(arrays), 0, len(rows), num_steps)

    def _draw_sequences(self, replay: SequenceReplay, num_items: int) -> dict[str, np.ndarray]:
        rows, sequences, weights = replay.sample(num_items, self._config.beta)
        return {**sequences.to_arrays(), "weights": weights, "rows": rows}

    def compute_loss(self, share: SampleShard) -> StepLoss:
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

    @torch.no_grad()
    def _compute_states(self, batch: ExperienceBatch, starts: SequenceStarts) -> np.ndarray:
        """The state before the row `state_rows` of each sequence, by the learner's weights. [K, S]"""
        observations = self._to_tensor(batch.observations)
        states = self.to_device(np.array(batch.extras[STATE]))
        offsets = np.cumsum(batch.lengths + 1) - (batch.lengths + 1)
        result, position = states.new_empty(len(starts.segments), states.shape[1]), 0
        for row in np.unique(starts.state_rows):
            chosen = np.flatnonzero(starts.state_rows == row)
            segments = self.to_device(starts.segments[chosen])
            if row > position:
                rows = offsets[starts.segments[chosen]] + np.arange(position, row)[:, None]
                states[segments] = self.model.advance(observations[rows], states[segments])
                position = int(row)
            result[chosen] = states[segments]
        return result.cpu().numpy()

    def _to_tensor(self, observations: np.ndarray) -> Tensor:
        """float32, in memory of its own; frames of bytes stay uint8."""
        is_bytes = self.model.encoder is not None and observations.dtype == np.uint8
        return self.to_device(np.array(observations, np.uint8 if is_bytes else np.float32))

    def _evaluate(self, sequences: Sequences, weights: Tensor) -> _Evaluation:
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
        losses = r2d2_loss(q, actions, targets, num_trained, weights)
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
