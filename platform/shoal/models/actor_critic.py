"""An actor-critic of two multilayer perceptrons, one for the policy and one for the value.

Called by the learner, which trains it, and by the endpoint, which serves `predict`. `policy_spec` tells an external
actor which of its tensors make up the policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.wire.spec import PolicySpec


class _FastTanh(torch.autograd.Function):
    """tanh x = 2 σ(2x) - 1, equal to torch.tanh within 2e-7 in float32; its derivative is 1 - tanh².

    On CPU torch.tanh takes 271 µs for [2064, 64], the sigmoid 30: the difference was a third of an update.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.sigmoid(x * 2).mul_(2).sub_(1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        gradient: Tensor = torch.ops.aten.tanh_backward(grads[0], y)
        return gradient


class Tanh(nn.Module):
    """nn.Tanh, faster where the device is a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(x) if x.is_cuda else _FastTanh.apply(x)  # type: ignore[no-untyped-call]
        return y


class ActorCritic(nn.Module):
    """Categorical policy and value over flat observations. Shapes: observation [B, observation_size]."""

    def __init__(self, observation_size: int, num_actions: int, hidden: Sequence[int] = (64, 64)) -> None:
        super().__init__()
        self.policy = _perceptron(observation_size, hidden, num_actions, output_gain=0.01)
        self.value = _perceptron(observation_size, hidden, 1, output_gain=1.0)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, num_actions] and values [B]."""
        return self.policy(observation), self.value(observation).squeeze(-1)

    def predict(self, observation: Tensor) -> dict[str, Tensor]:
        """What an endpoint answers: the most probable action int64 [B], logits [B, num_actions], value [B]."""
        logits, value = self(observation)
        return {"action": logits.argmax(-1), "logits": logits, "value": value}


def policy_spec(hidden: Sequence[int]) -> PolicySpec:
    """How an actor runs the policy of an ActorCritic with these hidden layers."""
    layers = tuple((f"policy.{2 * i}.weight", f"policy.{2 * i}.bias") for i in range(len(hidden) + 1))
    return PolicySpec("mlp_categorical", "tanh", layers)


def _perceptron(size: int, hidden: Sequence[int], output_size: int, output_gain: float) -> nn.Sequential:
    """Tanh layers with orthogonal weights; a small `output_gain` makes the first policy nearly uniform."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [_linear(size, width, math.sqrt(2)), Tanh()]
        size = width
    return nn.Sequential(*layers, _linear(size, output_size, output_gain))


def _linear(size: int, output_size: int, gain: float) -> nn.Linear:
    layer = nn.Linear(size, output_size)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
