"""A squashed Gaussian policy whose standard deviations depend on the observation, and the critics that teach it.

Called by SAC, which trains both, and by the endpoint, which serves `predict`. Observations are flat, [B,
observation_size], or frames, which an encoder takes (`frames`: its arguments).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.extend.models import OwnNetwork, SquashedGaussian, make_encoder
from shoal.libs.off_policy.q_network import make_layers


class GaussianActor(nn.Module):
    """Means and logarithms of standard deviations of u (see SquashedGaussian) by one perceptron of ReLU layers.

    At first every mean and logarithm is 0. With `network`, the arguments of an OwnNetwork, that one computes them.
    """

    def __init__(
        self,
        observation_size: int,
        num_actions: int,
        hidden: Sequence[int],
        action_low: Sequence[object],
        action_high: Sequence[object],
        frames: Mapping[str, Any] | None = None,
        network: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.distribution = SquashedGaussian(action_low, action_high)
        self.network = OwnNetwork(**network) if network is not None else None
        if self.network is not None:
            return
        self.encoder, observation_size = make_encoder(frames, observation_size)
        sizes = [observation_size, *hidden]
        layers = make_layers(sizes)
        last = nn.Linear(sizes[-1], 2 * num_actions)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.policy = nn.Sequential(*layers, last)

    def forward(self, observation: Tensor) -> Tensor:
        """The distribution's outputs, [B, 2 num_actions]."""
        if self.network is not None:
            own: Tensor = self.network(observation)[0]
            return own
        outputs: Tensor = self.policy(observation if self.encoder is None else self.encoder(observation))
        return outputs

    def predict(self, observation: Tensor) -> dict[str, Tensor]:
        """What an endpoint answers: the action float32 [B, *shape] at the mean, and mean and log_std of u
        [B, num_actions]."""
        mean, log_std = self.distribution.split(self(observation))
        return {"action": self.distribution.squash(mean), "mean": mean, "log_std": log_std}


class TwinCritic(nn.Module):
    """Two perceptrons of ReLU layers that estimate Q(s, a), computed together; a is scaled to [-1, 1].

    Over frames they share an encoder, which is not the policy's.
    """

    def __init__(
        self, observation_size: int, num_actions: int, hidden: Sequence[int], frames: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.encoder, observation_size = make_encoder(frames, observation_size)
        sizes = [observation_size + num_actions, *hidden, 1]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for size, width in itertools.pairwise(sizes):
            bound = size**-0.5  # as nn.Linear begins
            self.weights.append(nn.Parameter(torch.empty(2, size, width).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.empty(2, 1, width).uniform_(-bound, bound)))

    def forward(self, observation: Tensor, scaled_action: Tensor) -> Tensor:
        """Values [2, B] at observation [B, *obs] and scaled_action [B, num_actions]."""
        observation = observation.flatten(1) if self.encoder is None else self.encoder(observation)
        hidden = torch.cat([observation, scaled_action], -1).expand(2, -1, -1)
        last = len(self.weights) - 1
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden, weight)
            if index < last:
                hidden = torch.relu(hidden)
        return hidden.squeeze(-1)
