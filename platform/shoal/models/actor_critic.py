"""Actor-critics: two multilayer perceptrons, one for the policy and one for the value; or these after a recurrent core.

Called by the learner, which trains it, and by the endpoint, which serves `predict`. What an external actor is told of
their tensors, to compute the same in NumPy, is `policy_spec` of `rl.spec`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.differentiation import differentiate_plainly, is_each_operation_needed, is_plain_backward_needed
from shoal.models.action_distribution import Categorical, MultiCategorical, SquashedGaussian, mask_logits
from shoal.models.frame_encoder import RecurrentLayer, make_encoder
from shoal.models.own_network import OwnNetwork


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
        ctx.save_for_backward(*kept, *weights, *biases)
        return _affine(kept, weights[-1], biases[-1])

    @staticmethod
    def backward(ctx: Any, z_grad: Tensor) -> tuple[Tensor | None, ...]:
        num_layers = len(ctx.saved_tensors) // 3
        kept, weights, biases = (ctx.saved_tensors[at * num_layers :][:num_layers] for at in range(3))
        if is_plain_backward_needed(z_grad):
            parameters = [each for pair in zip(weights, biases, strict=True) for each in pair]
            return differentiate_plainly(_compute_layers, (kept[0], *parameters), ctx.needs_input_grad, z_grad)
        result: list[Tensor | None] = []
        for index in reversed(range(num_layers)):
            bias_grad = z_grad.sum(0)
            weight_grad = (
                kept[index].t() @ z_grad
            ).t()  # in the other order it takes five times as long if x is narrow
            if index:  # the layer's input was 2 s - 1, and d tanh z / dz = 4 s (1 - s)
                weight_grad = weight_grad * 2 - bias_grad.unsqueeze(-1)
                input_grad = z_grad @ (weights[index] * 4)
                z_grad = torch.ops.aten.sigmoid_backward.grad_input(input_grad, kept[index], grad_input=input_grad)
            result += [bias_grad, weight_grad]
        x_grad = z_grad @ weights[0] if ctx.needs_input_grad[0] else None
        return (x_grad, *reversed(result))


def _compute_layers(x: Tensor, *parameters: Tensor) -> Tensor:
    """The perceptron layer by layer."""
    for index, (weight, bias) in enumerate(zip(parameters[0::2], parameters[1::2], strict=True)):
        x = nn.functional.linear(torch.tanh(x) if index else x, weight, bias)
    return x


def _affine(saved: Sequence[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    """W h + b, where h is the input of the perceptron, or 2 s - 1 of the layer before."""
    if len(saved) == 1:
        return nn.functional.linear(saved[0], weight, bias)
    return nn.functional.linear(saved[-1], weight * 2, bias - weight.sum(1))


class _Perceptron(nn.Sequential):
    """Linear layers with tanh between them; faster than its layers one by one where the device is a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        is_plain = x.is_cuda or x.ndim != 2 or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")
        if is_plain or is_each_operation_needed():
            y: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        else:
            y = _TanhPerceptron.apply(x, *self.parameters())  # type: ignore[no-untyped-call]
        return y


class ActorCritic(nn.Module):
    """Policy and value over flat observations, or over frames, whose encoder they share (`frames`: its arguments).

    The policy is categorical; or of independent choices, of `action_sizes` each, for actions of `action_shape`; or
    squashed Gaussian between `action_low` and `action_high` (nested lists), with standard deviations that do not depend
    on the observation. With `network`, the arguments of an OwnNetwork, that one computes the outputs and the value.

    Values are learned in units of their targets, and answered as returns: `value_shift` + `value_scale` · output.

    Shapes: observation [B, observation_size]; num_actions is the number of choices, or of numbers in an action.
    """

    value_scale: Tensor
    value_shift: Tensor

    def __init__(
        self,
        observation_size: int,
        num_actions: int,
        hidden: Sequence[int] = (64, 64),
        action_low: Sequence[object] | None = None,
        action_high: Sequence[object] | None = None,
        frames: Mapping[str, Any] | None = None,
        action_sizes: Sequence[int] | None = None,
        action_shape: Sequence[int] = (),
        network: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("value_scale", torch.ones(()))
        self.register_buffer("value_shift", torch.zeros(()))
        self.encoder, observation_size = make_encoder(frames, observation_size)
        self.distribution: Categorical | MultiCategorical | SquashedGaussian = Categorical()
        self._action_shape = list(action_shape)
        if action_sizes is not None:
            self.distribution = MultiCategorical(action_sizes)
        self.log_std: nn.Parameter | None = None
        if action_low is not None and action_high is not None:
            self.distribution = SquashedGaussian(action_low, action_high)
        self.network = OwnNetwork(**network) if network is not None else None
        if self.network is not None:
            return
        if isinstance(self.distribution, SquashedGaussian):
            self.log_std = nn.Parameter(torch.zeros(num_actions))
        self.policy = _make_perceptron(observation_size, hidden, num_actions, output_gain=0.01)
        self.value = _make_perceptron(observation_size, hidden, 1, output_gain=1.0)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of the distribution (logits [B, num_actions]; or means, log stds, [B, 2 num_actions]), values [B]."""
        if self.network is not None:
            outputs, value = self.network(observation)
            return outputs, torch.addcmul(self.value_shift, value, self.value_scale)
        if self.encoder is not None:
            observation = self.encoder(observation)
        outputs = self.policy(observation)
        if self.log_std is not None:
            outputs = torch.cat([outputs, self.log_std.expand_as(outputs)], -1)
        return outputs, torch.addcmul(self.value_shift, self.value(observation).squeeze(-1), self.value_scale)

    def set_value_unit(self, scale: float, shift: float) -> None:
        """Let the value be `shift` + `scale` · output."""
        self.value_scale.fill_(scale)
        self.value_shift.fill_(shift)

    def predict(self, observation: Tensor, action_mask: Tensor | None = None) -> dict[str, Tensor]:
        """What an endpoint answers: the most probable action int64 [B], logits [B, num_actions], value [B]; of a Box,
        the action float32 [B, *shape] at the mean, mean and log_std of u [B, num_actions], value [B]. action_mask: bool
        [B, num_actions], the allowed choices."""
        logits, value = self(observation)
        logits = mask_logits(logits, action_mask)
        if isinstance(self.distribution, SquashedGaussian):
            mean, log_std = self.distribution.split(logits)
            return {"action": self.distribution.squash(mean), "mean": mean, "log_std": log_std, "value": value}
        if isinstance(self.distribution, MultiCategorical):
            action = self.distribution.choose(logits).reshape(-1, *self._action_shape)
            return {"action": action, "logits": logits, "value": value}
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


class RecurrentActorCritic(nn.Module):
    """Policy and value of an episode so far: hidden layers, a recurrent core, and an ActorCritic over its outputs.

    The last hidden layer is of the ActorCritic, the others come before the core. Observations are flat, or frames,
    which an encoder takes (`frames`: its arguments). `actions` are the arguments of the ActorCritic for its kind of
    actions. Legend: T steps of B sequences, S the size of a state.
    """

    def __init__(
        self,
        observation_size: int,
        num_actions: int,
        hidden: Sequence[int] = (64, 64),
        core: str = "gru",
        core_size: int = 64,
        frames: Mapping[str, Any] | None = None,
        **actions: Any,
    ) -> None:
        super().__init__()
        self.encoder, observation_size = make_encoder(frames, observation_size)
        sizes = [observation_size, *hidden[:-1]]
        layers: list[nn.Module] = []
        for size, width in itertools.pairwise(sizes):
            layers += [nn.Linear(size, width), nn.Tanh()]
            nn.init.orthogonal_(layers[-2].weight, math.sqrt(2))  # type: ignore[arg-type]
        self.trunk = nn.Sequential(*layers)
        self.core = RecurrentLayer(core, sizes[-1], core_size)
        self.head = ActorCritic(core_size, num_actions, hidden[-1:], **actions)

    @property
    def distribution(self) -> Categorical | MultiCategorical | SquashedGaussian:
        return self.head.distribution

    def set_value_unit(self, scale: float, shift: float) -> None:
        """As of an ActorCritic."""
        self.head.set_value_unit(scale, shift)

    def forward(self, observations: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs of the distribution [T, B, ...] and values [T, B] at observations [T, B, *obs], and the states after
        them [B, S]; state [B, S] is that before them."""
        features, state = self._run_core(observations, state)
        outputs, values = self.head(features.flatten(0, 1))
        return outputs.unflatten(0, features.shape[:2]), values.unflatten(0, features.shape[:2]), state

    def predict(self, observation: Tensor, state: Tensor, action_mask: Tensor | None = None) -> dict[str, Tensor]:
        """What an endpoint answers to observation [B, *obs] and state [B, S], which is zero at first: what an
        ActorCritic answers, and next_state [B, S], for the episode's next observation. action_mask: bool
        [B, num_actions], the allowed choices."""
        features, next_state = self._run_core(observation[None], state)
        return {**self.head.predict(features[0], action_mask), "next_state": next_state}

    def _run_core(self, observations: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if self.encoder is not None:
            observations = self.encoder(observations.flatten(0, 1)).unflatten(0, observations.shape[:2])
        outputs: tuple[Tensor, Tensor] = self.core(self.trunk(observations), state)
        return outputs


AnyActorCritic = ActorCritic | RecurrentActorCritic
