"""Action values by a perceptron that may have a stream for the value and one for advantages.

Called by DQN, which trains it, and by the endpoint, which serves `predict`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.extend.models import OwnNetwork, RecurrentLayer, make_encoder, mask_logits


class QNetwork(nn.Module):
    """Q(s, a) = V(s) + A(s, a) - mean of A(s, ·) (Wang et al., 1511.06581, equation 9); without `dueling`, A alone.

    All hidden layers but the last are common to both streams. `epsilon` is the actors' exploration, which travels with
    the weights. Observations are flat, [B, observation_size], or frames, which an encoder takes (`frames`: its
    arguments). With `network`, the arguments of an OwnNetwork, that one computes the values.

    They are learned in units of `value_scale`, and answered as returns.
    """

    epsilon: Tensor
    value_scale: Tensor

    def __init__(
        self,
        observation_size: int,
        num_actions: int,
        hidden: Sequence[int] = (64, 64),
        dueling: bool = True,
        frames: Mapping[str, Any] | None = None,
        network: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("value_scale", torch.ones(()))
        self.register_buffer("epsilon", torch.ones(()))
        self.network = OwnNetwork(**network) if network is not None else None
        if self.network is not None:
            return
        self.encoder, observation_size = make_encoder(frames, observation_size)
        common, stream = list(hidden[:-1]), list(hidden[-1:])
        self.trunk = nn.Sequential(*make_layers([observation_size, *common]))
        size = common[-1] if common else observation_size
        self.advantage = _make_stream(size, stream, num_actions)
        self.value = _make_stream(size, stream, 1) if dueling else None

    def forward(self, observation: Tensor) -> Tensor:
        """Action values [B, num_actions]."""
        if self.network is not None:
            q_values: Tensor = self.network(observation)[0]
            return q_values
        features = self.trunk(observation if self.encoder is None else self.encoder(observation))
        advantages: Tensor = self.advantage(features)
        if self.value is None:
            return advantages
        values: Tensor = self.value(features) - advantages.mean(-1, keepdim=True) + advantages
        return values

    def predict(self, observation: Tensor, action_mask: Tensor | None = None) -> dict[str, Tensor]:
        """What an endpoint answers: the best action int64 [B], q_values [B, num_actions], and the best value [B].
        action_mask: bool [B, num_actions], the allowed actions."""
        q_values = mask_logits(self(observation) * self.value_scale, action_mask)
        value, action = q_values.max(-1)
        return {"action": action, "q_values": q_values, "value": value}


class RecurrentQNetwork(nn.Module):
    """Action values of an episode so far: hidden layers, a recurrent core, and a QNetwork over its outputs.

    The last hidden layer is of the QNetwork, the others come before the core. Observations are flat, or frames, which
    an encoder takes (`frames`: its arguments). With `rescaling_epsilon`, values are learned as h(Q) (see R2D2).
    Legend: T steps of B sequences, S the size of a state, A actions.
    """

    def __init__(
        self,
        observation_size: int,
        num_actions: int,
        hidden: Sequence[int] = (64, 64),
        dueling: bool = True,
        core: str = "gru",
        core_size: int = 64,
        frames: Mapping[str, Any] | None = None,
        rescaling_epsilon: float | None = None,
    ) -> None:
        super().__init__()
        self._rescaling_epsilon = rescaling_epsilon
        self.encoder, observation_size = make_encoder(frames, observation_size)
        sizes = [observation_size, *hidden[:-1]]
        self.trunk = nn.Sequential(*make_layers(sizes))
        self.core = RecurrentLayer(core, sizes[-1], core_size)
        self.head = QNetwork(core_size, num_actions, hidden[-1:], dueling)

    @property
    def epsilon(self) -> Tensor:
        return self.head.epsilon

    def forward(self, observations: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Action values [T, B, A] at observations [T, B, *obs], and the states after them [B, S]; state [B, S] is that
        before them."""
        outputs, state = self.core(self._encode(observations), state)
        return self.head(outputs), state

    def advance(self, observations: Tensor, state: Tensor) -> Tensor:
        """The states [B, S] after observations [T, B, *obs]; state [B, S] is that before them."""
        _, state = self.core(self._encode(observations), state)
        return state

    def _encode(self, observations: Tensor) -> Tensor:
        if self.encoder is not None:
            observations = self.encoder(observations.flatten(0, 1)).unflatten(0, observations.shape[:2])
        features: Tensor = self.trunk(observations)
        return features

    def predict(self, observation: Tensor, state: Tensor, action_mask: Tensor | None = None) -> dict[str, Tensor]:
        """What an endpoint answers to observation [B, *obs] and state [B, S], which is zero at first: the best action
        int64 [B], q_values [B, A] as they are learned, the best value [B] as a return, and next_state [B, S], for the
        episode's next observation. action_mask: bool [B, A], the allowed actions."""
        values, next_state = self(observation[None], state)
        q_values = mask_logits(values[0], action_mask)
        value, action = q_values.max(-1)
        if self._rescaling_epsilon is not None:
            value = invert_rescaling(value, self._rescaling_epsilon)
        value = value * self.head.value_scale
        return {"action": action, "q_values": q_values, "value": value, "next_state": next_state}


def invert_rescaling(x: Tensor, epsilon: float) -> Tensor:
    """h⁻¹(x) = sign(x) (((√(1 + 4 ε (|x| + 1 + ε)) - 1) / (2 ε))² - 1), written so that no differences cancel."""
    size = x.abs()
    root = (1 + 4 * epsilon * (size + 1 + epsilon)).sqrt()
    above_one = 2 * size * (1 - 2 * epsilon / (root + 1 + 2 * epsilon)) / (root + 1)  # of the squared number
    return x.sign() * above_one * (above_one + 2)


def _make_stream(size: int, hidden: Sequence[int], output_size: int) -> nn.Sequential:
    return nn.Sequential(*make_layers([size, *hidden]), nn.Linear(hidden[-1] if hidden else size, output_size))


def make_layers(sizes: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for size, width in itertools.pairwise(sizes):
        layers += [nn.Linear(size, width), nn.ReLU()]
    return layers
