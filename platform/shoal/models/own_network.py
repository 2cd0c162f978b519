"""A network of the user's own, in the place of the layers of an actor-critic, a Q-network or SAC's actor.

Called by these models, which train and serve it; the actors get it as a graph (`rl.policy_graph`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.registry.code_import import load_source
from shoal.registry.manifest import find_callable


class OwnNetwork(nn.Module):
    """Builds the user's module and puts its outputs into the form of ours.

    The module's class is called with those of these arguments that its constructor names:

        observation_shape  tuple of int, without the batch axis
        observation_size   int, the product of the shape
        num_actions        int: choices of a Discrete; of a MultiDiscrete, those of all its numbers together; numbers
                           of a Box
        hidden             tuple of int, the run's `hidden`

    Its `forward` takes observations, float32 [N, *observation_shape] (bytes as 0 to 255), and returns float32:

        impala, ppo        (logits [N, num_actions], value [N]);
                           of a Box (mean [N, num_actions], log_std [N, num_actions] or [num_actions], value [N])
        dqn                q [N, num_actions]
        sac                (mean, log_std); the critics stay ours

    mean and log_std are of u, in the action center + radius · tanh(u). A row of the outputs depends on its own row of
    observations alone, and on no random number. The module is in evaluation mode always: dropout does nothing, and
    batch normalisation keeps its first statistics.

    word, name, source: as of a NetworkSource
    is_gaussian:        a mean and a log_std are wanted; has_value: and a value
    is_normalized:      published weights have the shift and the scale of the observations; in the learner, 0 and 1
    """

    shift: Tensor
    scale: Tensor

    def __init__(
        self,
        word: str,
        name: str,
        source: str,
        observation_shape: Sequence[int],
        observation_size: int,
        num_actions: int,
        hidden: Sequence[int],
        is_gaussian: bool,
        has_value: bool,
        is_normalized: bool = False,
    ) -> None:
        super().__init__()
        self._reference = word
        self._is_gaussian = is_gaussian
        self._has_value = has_value
        offered = {
            "observation_shape": tuple(observation_shape),
            "observation_size": observation_size,
            "num_actions": num_actions,
            "hidden": tuple(hidden),
        }
        if not source:
            factory = find_callable("model", word)
        else:
            factory = getattr(load_source(source, word, "model"), name, None)
            if not callable(factory):
                raise ConfigError("model", word, f"there is no class {name!r} in it")
        parameters = inspect.signature(factory).parameters
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        given = offered if takes_any else {key: each for key, each in offered.items() if key in parameters}
        try:
            module = factory(**given)
        except Exception as error:  # user code may raise anything
            remedy = f"its constructor may name any of {', '.join(offered)}"
            raise ConfigError("model", word, f"cannot be built: {type(error).__name__}: {error}", remedy) from error
        if not isinstance(module, nn.Module):
            raise ConfigError("model", word, f"gives a {type(module).__name__}", "name a subclass of torch.nn.Module")
        self.module = module
        self._is_normalized = is_normalized
        if is_normalized:
            self.register_buffer("shift", torch.zeros(*observation_shape))
            self.register_buffer("scale", torch.ones(*observation_shape))
        self.eval()

    def train(self, mode: bool = True) -> Self:
        return super().train(False)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor | None]:
        """The outputs of the distribution, or the action values, [N, num_actions or twice as many]; the values [N].

        Raises ConfigError when the module gives something else.
        """
        observation = observation.float()
        found = self.module((observation - self.shift) * self.scale if self._is_normalized else observation)
        tensors = list(found) if isinstance(found, tuple | list) else [found]
        names = (["mean", "log_std"] if self._is_gaussian else ["outputs"]) + ["value"] * self._has_value
        if len(tensors) != len(names) or not all(isinstance(each, Tensor) for each in tensors):
            kinds = ", ".join(type(each).__name__ for each in tensors)
            given = f"({kinds})" if isinstance(found, tuple | list) else f"a {kinds}"
            raise ConfigError("model", self._reference, f"forward gives {given}, expected ({', '.join(names)})")
        value = tensors.pop() if self._has_value else None
        if self._is_gaussian:
            mean, log_std = tensors
            return torch.cat([mean, log_std.expand_as(mean)], -1), value
        return tensors[0], value
