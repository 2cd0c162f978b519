"""An actor-critic of two multilayer perceptrons, one for the policy and one for the value.

Called by the learner, which trains it, and by the endpoint, which serves `predict`. What an external actor is told of
its tensors is `policy_spec` of `rl.spec`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class _TanhPerceptron(torch.autograd.Function):
    """A perceptron of tanh layers with a linear last one, as one function with a derivative of its own.

    tanh z = 2 σ(2z) - 1, so a layer keeps s = σ(2z) alone: the doubling goes into the product that makes z, and
    W tanh z + b = 2 W s + (b - W 1) into the next. Equal to torch.tanh within 2e-7 a layer in float32. On CPU
    torch.tanh takes 271 µs for [2064, 64], the sigmoid 30; in place, nothing but products and sigmoids is left.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[0::2], parameters[1::2]
        kept = [x]  # the input, then s of each hidden layer
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            kept.append(_affine(kept, weight * 2, bias * 2).sigmoid_())
        ctx.save_for_backward(*kept, *weights)
        return _affine(kept, weights[-1], biases[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        num_layers = len(ctx.saved_tensors) // 2
        kept, weights = ctx.saved_tensors[:num_layers], ctx.saved_tensors[num_layers:]
        z_grad = grads[0]
        found: list[Tensor | None] = []
        for index in reversed(range(num_layers)):
            bias_grad = z_grad.sum(0)
            weight_grad = (
                kept[index].t() @ z_grad
            ).t()  # in the other order it takes five times as long if x is narrow
            if index:  # the layer's input was 2 s - 1, and d tanh z / dz = 4 s (1 - s)
                weight_grad = weight_grad * 2 - bias_grad.unsqueeze(-1)
                input_grad = z_grad @ (weights[index] * 4)
                z_grad = torch.ops.aten.sigmoid_backward.grad_input(input_grad, kept[index], grad_input=input_grad)
            found += [bias_grad, weight_grad]
        x_grad = z_grad @ weights[0] if ctx.needs_input_grad[0] else None
        return (x_grad, *reversed(found))


def _affine(kept: Sequence[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    """W h + b, where h is the input of the perceptron, or 2 s - 1 of the layer before."""
    if len(kept) == 1:
        return nn.functional.linear(kept[0], weight, bias)
    return nn.functional.linear(kept[-1], weight * 2, bias - weight.sum(1))


class _Perceptron(nn.Sequential):
    """Linear layers with tanh between them; faster than its layers one by one where the device is a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            y: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        else:
            y = _TanhPerceptron.apply(x, *self.parameters())  # type: ignore[no-untyped-call]
        return y


class ActorCritic(nn.Module):
    """Categorical policy and value over flat observations. Shapes: observation [B, observation_size]."""

    def __init__(self, observation_size: int, num_actions: int, hidden: Sequence[int] = (64, 64)) -> None:
        super().__init__()
        self.policy = _make_perceptron(observation_size, hidden, num_actions, output_gain=0.01)
        self.value = _make_perceptron(observation_size, hidden, 1, output_gain=1.0)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, num_actions] and values [B]."""
        return self.policy(observation), self.value(observation).squeeze(-1)

    def predict(self, observation: Tensor) -> dict[str, Tensor]:
        """What an endpoint answers: the most probable action int64 [B], logits [B, num_actions], value [B]."""
        logits, value = self(observation)
        return {"action": logits.argmax(-1), "logits": logits, "value": value}


def _make_perceptron(size: int, hidden: Sequence[int], output_size: int, output_gain: float) -> _Perceptron:
    """Tanh layers with orthogonal weights; a small `output_gain` makes the first policy nearly uniform."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [_make_linear(size, width, math.sqrt(2)), nn.Tanh()]
        size = width
    return _Perceptron(*layers, _make_linear(size, output_size, output_gain))


def _make_linear(size: int, output_size: int, gain: float) -> nn.Linear:
    layer = nn.Linear(size, output_size)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
