"""Draws a policy's actions from the distribution that its outputs stand for, in place of the best ones.

Made by the predictor of a model whose outputs describe such a distribution; called by the served model after each
forward. Knows no model, no version and no protocol.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.errors import ConfigError, InferenceError
from shoal.registry.manifest import ModelFactory, Signature
from shoal.serve.messages.infer_call import InferCall, Outputs

ACTIONS = ("best", "sampled")
MAX_SEED = 2**63


class ActionSampler:
    """is_default: whether it acts for calls that do not say.

    The distribution is categorical by `logits`, independent for each of the factory's `action_sizes`; or a squashed
    Gaussian by `mean` and `log_std`, between its `action_low` and `action_high`."""

    def __init__(self, kwargs: Mapping[str, Any], is_default: bool) -> None:
        self.is_default = is_default
        self._splits = np.cumsum(kwargs.get("action_sizes") or [0])[:-1]
        self._low, self._high = (np.array(kwargs.get(name), np.float64) for name in ("action_low", "action_high"))

    def act(self, outputs: Outputs, call: InferCall) -> Outputs:
        """The outputs of a call, where it samples with other actions, drawn by its seed. A call without a seed gets one
        here, so that its shadow draws the same."""
        if call.action == "best" or (call.action is None and not self.is_default):
            return outputs
        if call.seed is None:
            call.seed = random.getrandbits(63)
        return {**outputs, "action": self.draw(outputs, np.random.default_rng(call.seed))}

    def draw(self, outputs: Mapping[str, np.ndarray], generator: np.random.Generator) -> np.ndarray:
        """Actions [B, *act] from the distribution of these outputs."""
        best = outputs["action"]
        if "logits" in outputs:
            logits = outputs["logits"]
            noisy = logits + generator.gumbel(size=logits.shape)  # its argmax has the distribution of the logits
            drawn = np.stack([part.argmax(-1) for part in np.split(noisy, self._splits, -1)], -1)
        else:
            mean = outputs["mean"]
            u = mean + np.exp(outputs["log_std"]) * generator.standard_normal(mean.shape)
            center, radius = (self._low + self._high) / 2, (self._high - self._low) / 2
            drawn = np.clip(center + radius * np.tanh(u).reshape(best.shape), self._low, self._high)
        return drawn.reshape(best.shape).astype(best.dtype)


def make_sampler(factory: ModelFactory, signature: Signature, action: str | None) -> ActionSampler | None:
    """None for a model that is no policy, or one without a distribution, such as DQN's. action: the option, which
    replaces the version's own. Raises ConfigError where it cannot be."""
    network = factory.kwargs.get("network")  # of an optimised policy or a mixture, a factory
    kwargs = network.get("kwargs", factory.kwargs) if isinstance(network, Mapping) else factory.kwargs
    shapes = {spec.name: spec.shape for spec in signature.outputs}
    is_one_choice = "logits" in shapes and shapes.get("action") == [-1]
    if signature.has_distribution and (is_one_choice or "action_sizes" in kwargs or "action_low" in kwargs):
        return ActionSampler(kwargs, (action or factory.action) == "sampled")
    if action == "sampled":
        names = ", ".join(shapes)
        raise ConfigError("action", action, f"the outputs ({names}) are no distribution of actions", "leave it out")
    return None


def check_parameters(call: InferCall, sampler: ActionSampler | None) -> None:
    """Raise InferenceError (400) for values of the parameters `action` and `seed` that this model does not take. One
    that is no policy ignores other values, as it does other parameters."""
    action, seed = call.action, call.seed
    if action == "sampled" and sampler is None:
        raise InferenceError(400, "parameter action = 'sampled': the outputs are no distribution of actions")
    if sampler is None or (action is None and seed is None):
        return
    if action not in (None, *ACTIONS):
        raise InferenceError(400, f"parameter action = {str(action)[:40]!r}: expected best or sampled")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < MAX_SEED):
        raise InferenceError(400, f"parameter seed = {str(seed)[:40]!r}: expected an integer from 0 to 2^63 - 1")
