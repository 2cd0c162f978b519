"""Acting in NumPy with pulled weights: the policies that a `welcome` message can describe.

Called by the actor's loop. Legend: obs is one observation, flat; n actions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from shoal.errors import ConfigError, WeightsError
from shoal.wire.experience_spec import PolicySpec


class MlpPolicy:
    """A multilayer perceptron whose outputs are the logits of a categorical distribution ("mlp_categorical")."""

    def __init__(self, spec: PolicySpec, seed: int | None = None) -> None:
        if spec.kind != "mlp_categorical":
            raise ConfigError("policy.kind", spec.kind, "is unknown to this actor", "install a newer shoal")
        if spec.activation not in ("tanh", "relu"):
            raise ConfigError("policy.activation", spec.activation, "is unknown to this actor")
        self._spec = spec
        self._is_relu = spec.activation == "relu"
        self._layers: list[tuple[np.ndarray, np.ndarray]] = []
        self._random = np.random.default_rng(seed)
        self._uniforms: list[float] = []
        self.version = 0

    def load(self, version: int, tensors: Mapping[str, np.ndarray]) -> None:
        """Use these weights from the next action on. Raises WeightsError when one is missing or does not fit."""
        layers: list[tuple[np.ndarray, np.ndarray]] = []
        for weight_name, bias_name in self._spec.layers:
            if weight_name not in tensors or bias_name not in tensors:
                raise WeightsError(f"version {version} has no {weight_name!r} or no {bias_name!r}")
            weight, bias = tensors[weight_name], tensors[bias_name]
            if weight.ndim != 2 or bias.shape != weight.shape[:1]:
                raise WeightsError(f"version {version}: {weight_name} is {weight.shape}, its bias {bias.shape}")
            if layers and layers[-1][1].size != weight.shape[1]:
                raise WeightsError(f"version {version}: {weight_name} takes {weight.shape[1]} inputs")
            layers.append((np.ascontiguousarray(weight), bias))
        self._layers, self.version = layers, version

    def act(self, observation: np.ndarray) -> tuple[int, float]:
        """Sample an action; returns it with its log-probability."""
        hidden = np.asarray(observation, np.float32)  # the learner's dtype; a wider one would slow down every layer
        last = len(self._layers) - 1
        for index, (weight, bias) in enumerate(self._layers):
            hidden = weight @ hidden
            hidden += bias
            if index < last:
                if self._is_relu:
                    np.maximum(hidden, 0.0, out=hidden)
                else:
                    np.tanh(hidden, out=hidden)
        return self._sample(hidden.tolist())

    def _sample(self, logits: list[float]) -> tuple[int, float]:
        """Inverse-transform sampling; plain floats are faster than arrays for a handful of actions."""
        highest = max(logits)
        weights = [math.exp(logit - highest) for logit in logits]
        total = sum(weights)
        if not self._uniforms:
            self._uniforms = self._random.random(1024).tolist()
        threshold = self._uniforms.pop() * total
        action = 0
        for weight in weights[:-1]:
            threshold -= weight
            if threshold < 0:
                break
            action += 1
        return action, logits[action] - highest - math.log(total)
