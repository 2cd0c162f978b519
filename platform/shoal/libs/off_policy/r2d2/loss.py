"""R2D2's value rescaling, targets, loss and priorities. Pure functions of tensors.

Kapturowski et al., Recurrent Experience Replay in Distributed Reinforcement Learning (ICLR 2019,
https://openreview.net/forum?id=r1lyTjAqYX). Legend: B sequences of U steps, n steps of a target, A actions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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


def invert_rescaling(x: Tensor, epsilon: float) -> Tensor:
    """h⁻¹(x) = sign(x) (((√(1 + 4 ε (|x| + 1 + ε)) - 1) / (2 ε))² - 1). In double precision: differences cancel."""
    y = x.double()
    root = ((1 + 4 * epsilon * (y.abs() + 1 + epsilon)).sqrt() - 1) / (2 * epsilon)
    return (y.sign() * (root.square() - 1)).to(x.dtype)


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
