"""Acting in NumPy with pulled weights: the policies that a `welcome` message can describe.

Called by the actor's loop. Legend: obs is one observation, flat; n actions; B streams, each with an observation.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from shoal.actor.policy_networks import GraphNetwork, Kernel, compute_features, load_kernels
from shoal.actor.recurrent_policy import (
    PREFIX,
    ActionBatch,
    Masks,
    RecurrentPolicy,
    Rows,
    describe_head,
    load_layers,
)
from shoal.errors import ConfigError, WeightsError
from shoal.wire.experience_spec import NO_EXTRAS, PolicySpec

LARGEST_SQUASHED = 1.0 - 1e-6  # of tanh(u), whose inverse is infinite at 1
LOG_STD_LIMITS = (-20.0, 2.0)
MIN_ARRAY_ROWS = 8  # from here on, sampling them as arrays is faster than one by one


class MlpPolicy:
    """A multilayer perceptron whose outputs are the logits of a categorical distribution ("mlp_categorical")."""

    kind = "mlp_categorical"

    def __init__(self, spec: PolicySpec, seed: int | None = None) -> None:
        if spec.kind.replace("graph_", "mlp_") != self.kind:
            raise ConfigError("policy.kind", spec.kind, "is unknown to this actor", "install a newer shoal")
        self._graph = GraphNetwork(spec.graph) if spec.kind.startswith("graph_") else None
        if spec.activation not in ("tanh", "relu") and self._graph is None:
            raise ConfigError("policy.activation", spec.activation, "is unknown to this actor")
        self._spec = spec
        self._activate: Any = partial(np.maximum, 0.0) if spec.activation == "relu" else np.tanh
        self._layers: list[tuple[np.ndarray, np.ndarray]] = []
        self._kernels: list[Kernel] = []
        self._num_outputs: int | None = None  # where the spec says how many the last layer has
        self._random = np.random.default_rng(seed)
        self._uniforms: list[float] = []
        self.version = 0

    def load(self, version: int, tensors: Mapping[str, np.ndarray]) -> None:
        """Use these weights from the next action on. Raises WeightsError when one is missing or does not fit."""
        if self._graph is not None:
            self._graph.load(version, tensors)
            self.version = version
            return
        bias, num_outputs = tensors.get(self._spec.layers[-1][1]), self._num_outputs
        if bias is not None and num_outputs is not None and bias.shape != (num_outputs,):
            raise WeightsError(f"version {version}: {self._spec.layers[-1][1]} is {bias.shape}, not ({num_outputs},)")
        layers = load_layers(self._spec.layers, version, tensors)
        self._kernels = load_kernels(self._spec, version, tensors)
        self._layers, self.version = layers, version

    def reset(self, stream: Hashable = 0) -> None:
        """The next observation of this stream begins an episode."""

    def get_extras(self, stream: Hashable = 0) -> Mapping[str, Any]:
        """What a segment carries with the next observation of this stream."""
        return NO_EXTRAS

    def act(self, observation: np.ndarray, stream: Hashable = 0, mask: np.ndarray | None = None) -> tuple[Any, float]:
        """Sample an action; returns it with its log-probability.

        stream: the key of the episode; mask: bool [K], the allowed choices (see wire.action_masks); default: all
        """
        return self._sample_allowed(self._compute(observation), mask, 0)

    def _compute(self, observation: np.ndarray) -> list[float]:
        """The outputs at one observation."""
        outputs: list[float]
        if self._graph is not None:
            outputs = self._graph.compute(np.asarray(observation)[None])[0].tolist()
            return outputs
        if self._kernels:
            observation = compute_features(np.asarray(observation)[None], self._spec, self._kernels)[0]
        hidden = np.asarray(observation, np.float32)  # the learner's dtype; a wider one would slow down every layer
        last = len(self._layers) - 1
        for index, (weight, bias) in enumerate(self._layers):
            hidden = weight.dot(hidden)  # of one row, half of what the operator takes
            hidden += bias
            if index < last:
                self._activate(hidden, out=hidden)
        outputs = hidden.tolist()
        return outputs

    def act_batch(self, observations: Rows, streams: Sequence[Hashable], masks: Masks = None) -> ActionBatch:
        """Sample an action for each of the observations [B, *obs]; returns them with their log-probabilities.

        streams: the key of each observation's stream [B]: its number, from 0 on, or an actor's id and a key; `act` is
                 stream 0
        masks:   of each observation bool [K], in a run with action masks

        The layers are computed for all together. Sums are rounded in another order than by `act`: log-probabilities
        differ by that.
        """
        if len(observations) == 1:
            mask = masks[0] if masks is not None else None
            action, log_probability = self._sample_allowed(self._compute(observations[0]), mask, streams[0])
            return [action], [log_probability]
        return self._sample_batch(self.compute_outputs(observations), streams, masks)

    def compute_outputs(self, observations: Rows, streams: Sequence[Hashable] = ()) -> np.ndarray:
        """The outputs of the last layer, float32 [B, n], for observations [B, *obs]. streams: see `act_batch`"""
        if self._graph is not None:
            return self._graph.compute(np.asarray(observations))
        hidden = np.asarray(observations, None if self._kernels else np.float32)
        if self._kernels:
            hidden = compute_features(hidden, self._spec, self._kernels)
        last = len(self._layers) - 1
        for index, (weight, bias) in enumerate(self._layers):
            hidden = hidden @ weight.T
            hidden += bias
            if index < last:
                self._activate(hidden, out=hidden)
        return hidden

    def _sample_batch(self, outputs: np.ndarray, streams: Sequence[Hashable], masks: Masks = None) -> ActionBatch:
        """Sample from outputs [B, n]. A handful of plain floats is faster than a dozen operations on small arrays."""
        if (
            len(outputs) >= MIN_ARRAY_ROWS
            and type(self) is MlpPolicy
            and (masks is None or isinstance(masks, np.ndarray))
        ):
            if masks is not None:
                outputs = np.where(masks, outputs, -np.inf)
            shifted = outputs - outputs.max(axis=1, keepdims=True)
            sums = np.exp(shifted).cumsum(axis=1)
            # Above 0 and up to the sum, so that none is chosen of probability 0.
            thresholds = (1.0 - self._random.random(len(outputs))) * sums[:, -1]
            chosen = (sums[:, :-1] < thresholds[:, None]).sum(axis=1)
            log_pi = shifted[np.arange(len(outputs)), chosen] - np.log(sums[:, -1])
            return chosen.tolist(), log_pi.tolist()
        actions, log_probabilities = [], []
        for row, stream, mask in zip(
            outputs.tolist(), streams, [None] * len(outputs) if masks is None else masks, strict=True
        ):
            action, log_probability = self._sample_allowed(row, mask, stream)
            actions.append(action)
            log_probabilities.append(log_probability)
        return actions, log_probabilities

    def _sample_allowed(self, outputs: list[float], mask: np.ndarray | None, stream: Hashable) -> tuple[Any, float]:
        """Sample as if there were only the allowed actions; without a mask all are."""
        if mask is None:
            return self._sample(outputs, stream)
        allowed = np.flatnonzero(mask).tolist()
        action, log_probability = self._sample([outputs[each] for each in allowed], stream)
        return allowed[action], log_probability

    def _sample(self, logits: list[float], stream: Hashable) -> tuple[Any, float]:
        """Inverse-transform sampling."""
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


class EpsilonGreedyPolicy(MlpPolicy):
    """The action of the largest output, and with probability ε any action ("mlp_epsilon_greedy").

    As in Ape-X (1803.00933, §4.1) each actor has an ε of its own. Its id alone decides, so that it survives restarts.
    So does each further stream of an actor, by its number.
    """

    kind = "mlp_epsilon_greedy"

    def __init__(self, spec: PolicySpec, seed: int | None = None, actor_id: str = "") -> None:
        super().__init__(spec, seed)
        self._actor_id = actor_id
        self._base = 1.0

    def load(self, version: int, tensors: Mapping[str, np.ndarray]) -> None:
        if self._spec.epsilon not in tensors:
            raise WeightsError(f"version {version} has no {self._spec.epsilon!r}")
        super().load(version, tensors)
        self._base = float(tensors[self._spec.epsilon])

    def get_epsilon(self, stream: Hashable = 0) -> float:
        """The probability with which a stream explores."""
        actor_id, number = stream if isinstance(stream, tuple) else (self._actor_id, stream)
        position = find_ladder_position(actor_id, number if isinstance(number, int) else 0)
        return float(self._base ** (1.0 + self._spec.epsilon_exponent * position))

    def _sample_batch(self, outputs: np.ndarray, streams: Sequence[Hashable], masks: Masks = None) -> ActionBatch:
        if len(outputs) < MIN_ARRAY_ROWS or masks is not None:
            return super()._sample_batch(outputs, streams, masks)
        num_actions = outputs.shape[1]
        best = outputs.argmax(axis=1)
        drawn = self._random.random(len(outputs))
        epsilons = np.array([self.get_epsilon(stream) for stream in streams])
        explored = (drawn / np.maximum(epsilons, np.finfo(np.float64).tiny) * num_actions).clip(0, num_actions - 1)
        actions = np.where(drawn < epsilons, explored.astype(np.int64), best)
        return actions.tolist(), np.log(epsilons / num_actions + (1.0 - epsilons) * (actions == best)).tolist()

    def _sample(self, logits: list[float], stream: Hashable) -> tuple[int, float]:
        if not self._uniforms:
            self._uniforms = self._random.random(1024).tolist()
        drawn = self._uniforms.pop()
        num_actions = len(logits)
        epsilon = self.get_epsilon(stream)
        best = logits.index(max(logits))
        action = int(drawn / epsilon * num_actions) if drawn < epsilon else best
        probability = epsilon / num_actions + (1.0 - epsilon if action == best else 0.0)
        return action, math.log(probability)


class MultiCategoricalPolicy(MlpPolicy):
    """Independent choices, whose logits are the outputs end to end ("mlp_multi_categorical").

    `act` returns an int64 [*act] and the sum of the log-probabilities.
    """

    kind = "mlp_multi_categorical"

    def __init__(self, spec: PolicySpec, seed: int | None = None, shape: tuple[int, ...] = ()) -> None:
        super().__init__(spec, seed)
        self._shape = shape
        self._num_outputs = sum(spec.action_sizes)

    def _sample_allowed(self, outputs: list[float], mask: np.ndarray | None, stream: Hashable) -> tuple[Any, float]:
        mask = np.ones(len(outputs), np.bool_) if mask is None else mask
        actions = []
        log_probability = 0.0
        begin = 0
        for size in self._spec.action_sizes:
            allowed = np.flatnonzero(mask[begin : begin + size]).tolist()
            index, each = super()._sample([outputs[begin + choice] for choice in allowed], stream)
            actions.append(allowed[index])
            log_probability += each
            begin += size
        return np.array(actions).reshape(self._shape), log_probability


class SquashedGaussianPolicy(MlpPolicy):
    """Actions of a Box: a = center + half · tanh(u), where u is Gaussian ("mlp_squashed_gaussian").

    `act` returns a float32 [*act], within the bounds, and the log-density of the u that belongs to it. Noise may go on
    from step to step of a stream; at each step alone it is standard normal, which the log-density is of.
    """

    kind = "mlp_squashed_gaussian"

    def __init__(self, spec: PolicySpec, seed: int | None = None, shape: tuple[int, ...] = ()) -> None:
        super().__init__(spec, seed)
        self._shape = shape
        self._low, self._high = np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32)
        low, high = np.array(spec.action_low), np.array(spec.action_high)
        self._center, self._half = (low + high) / 2, (high - low) / 2
        self._log_stds = np.empty(0)
        self._decays = np.array(spec.noise_decays)[:, None]
        self._noises: dict[Hashable, np.ndarray] = {}  # [K, n] of streams that have acted in their present episode
        self._num_outputs = self._low.size * (1 if spec.log_std else 2)

    def load(self, version: int, tensors: Mapping[str, np.ndarray]) -> None:
        if self._spec.log_std:
            log_stds = tensors.get(self._spec.log_std)
            if log_stds is None or log_stds.shape != self._low.shape:
                raise WeightsError(f"version {version} has no {self._spec.log_std!r} of {self._low.shape}")
            self._log_stds = log_stds.astype(np.float64)
        super().load(version, tensors)

    def reset(self, stream: Hashable = 0) -> None:
        self._noises.pop(stream, None)

    def act(self, observation: np.ndarray, stream: Hashable = 0, mask: np.ndarray | None = None) -> tuple[Any, float]:
        return self._sample(self._compute(observation), stream)

    def _sample(self, logits: list[float], stream: Hashable) -> tuple[Any, float]:
        actions, log_densities = self._sample_batch(np.array([logits]), (stream,))
        return actions[0], log_densities[0]

    def _sample_batch(self, outputs: np.ndarray, streams: Sequence[Hashable], masks: Masks = None) -> ActionBatch:
        num_numbers, outputs = self._low.size, outputs.astype(np.float64)
        means = outputs[:, :num_numbers]
        log_stds = np.clip(self._log_stds if self._spec.log_std else outputs[:, num_numbers:], *LOG_STD_LIMITS)
        stds = np.exp(log_stds)
        u = means + stds * self._draw_noise(means.shape, streams)
        actions = np.clip((self._center + self._half * np.tanh(u)).astype(np.float32), self._low, self._high)
        # By the rounded action, as the learner sees it: both find the same u.
        y = np.clip((actions - self._center) / self._half, -LARGEST_SQUASHED, LARGEST_SQUASHED)
        noise = (np.arctanh(y) - means) / stds
        log_densities = -0.5 * (noise**2).sum(-1) - log_stds.sum(-1) - 0.5 * math.log(2 * math.pi) * num_numbers
        return list(actions.reshape(len(actions), *self._shape)), log_densities.tolist()

    def _draw_noise(self, shape: tuple[int, int], streams: Sequence[Hashable]) -> np.ndarray:
        if not self._decays.size:
            return self._random.standard_normal(shape)
        drawn = self._random.standard_normal((shape[0], self._decays.size, shape[1]))
        for noise, stream in zip(drawn, streams, strict=True):
            if (before := self._noises.get(stream)) is not None:
                noise *= np.sqrt(1 - self._decays**2)
                noise += self._decays * before
            self._noises[stream] = noise.copy()
        total: np.ndarray = drawn.sum(1) / math.sqrt(self._decays.size)
        return total


@lru_cache(maxsize=4096)
def find_ladder_position(actor_id: str, stream: int = 0) -> float:
    """A stream's u in [0, 1), by the actor's id alone: the bits of the number at its end, mirrored at the binary point;
    further streams of the actor are as far beyond, modulo 1, as their own mirrored numbers.

    actor-0, actor-1, actor-2, actor-3 are at 0, 1/2, 1/4, 3/4 (van der Corput): spread evenly, however many they are.
    An id without a number at its end is at its SHA-256, read as a binary fraction.
    """
    digits = re.search(r"[0-9]+$", actor_id)
    if digits is None:
        position = int.from_bytes(hashlib.sha256(actor_id.encode()).digest()[:4], "big") / 2**32
    else:
        position = _reverse_bits(int(digits[0]) % 2**32)
    return (position + _reverse_bits(stream)) % 1.0


def _reverse_bits(number: int) -> float:
    return int(f"{number:032b}"[::-1], 2) / 2**32


Policy = MlpPolicy | RecurrentPolicy


def make_policy(
    spec: PolicySpec, seed: int | None = None, actor_id: str = "", action_shape: tuple[int, ...] = ()
) -> Policy:
    """The policy of a run. Raises ConfigError for a kind that is unknown here."""
    if spec.kind.startswith(PREFIX):
        head = make_policy(describe_head(spec), seed, actor_id, action_shape)
        return RecurrentPolicy(spec, head)
    kind = spec.kind.replace("graph_", "mlp_")
    if kind == MultiCategoricalPolicy.kind:
        return MultiCategoricalPolicy(spec, seed, action_shape)
    if kind == SquashedGaussianPolicy.kind:
        return SquashedGaussianPolicy(spec, seed, action_shape)
    if kind == EpsilonGreedyPolicy.kind:
        return EpsilonGreedyPolicy(spec, seed, actor_id)
    return MlpPolicy(spec, seed)
