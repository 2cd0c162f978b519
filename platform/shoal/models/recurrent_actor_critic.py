"""An actor-critic with a recurrent core. Called by the learner, which trains it, and by the endpoint.

An actor computes the same in NumPy, by what `policy_spec` of `rl.spec` says of its tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shoal.models.action_distribution import Categorical, MultiCategorical, SquashedGaussian
from shoal.models.actor_critic import ActorCritic
from shoal.models.frame_encoder import RecurrentLayer, make_encoder


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
