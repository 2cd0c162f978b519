"""Acting in NumPy with a recurrent core: a GRU or an LSTM between the layers of a policy.

Called by `make_policy`. The policy owns the state of each stream, which is one episode after another under a key, and
starts from zeros at each episode's first observation. Legend: H core_size, S = H of a GRU, 2 H of an LSTM (h, c).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from shoal.actor.policy_networks import Kernel, compute_features, load_kernels
from shoal.errors import ConfigError, WeightsError
from shoal.wire.experience_spec import STATE, PolicySpec

PREFIX = "recurrent_"
NUM_GATES = {"gru": 3, "lstm": 4}
Rows = Sequence[np.ndarray] | np.ndarray  # observations [B, *obs]
Masks = Sequence[np.ndarray | None] | np.ndarray | None  # of each observation bool [K]
ActionBatch = tuple[Sequence[Any], Sequence[float]]  # actions [B], and their log-probabilities


class PolicyHead(Protocol):
    """The policy of the layers after the core."""

    @property
    def version(self) -> int: ...

    def load(self, version: int, tensors: Mapping[str, np.ndarray]) -> None: ...

    def reset(self, stream: Hashable = 0) -> None: ...

    def act(
        self, observation: np.ndarray, stream: Hashable = 0, mask: np.ndarray | None = None
    ) -> tuple[Any, float]: ...

    def act_batch(self, observations: Rows, streams: Sequence[Hashable], masks: Masks = None) -> ActionBatch: ...

    def compute_outputs(self, observations: Rows, streams: Sequence[Hashable] = ()) -> np.ndarray: ...


class RecurrentPolicy:
    """Layers, a core, and a head: the policy of the further layers, which samples ("recurrent_categorical", ...)."""

    def __init__(self, spec: PolicySpec, head: PolicyHead) -> None:
        if spec.core not in NUM_GATES:
            raise ConfigError("policy.core", spec.core, "is unknown to this actor", "install a newer shoal")
        self.kind = spec.kind
        self._spec, self._head = spec, head
        self._layers: list[tuple[np.ndarray, np.ndarray]] = []
        self._kernels: list[Kernel] = []
        self._core: RecurrentCore  # of the weights, by `load`
        self._states: dict[Hashable, np.ndarray] = {}  # of streams that have acted in their present episode

    @property
    def version(self) -> int:
        return self._head.version

    def load(self, version: int, tensors: Mapping[str, np.ndarray]) -> None:
        """Use these weights from the next action on; states stay. Raises WeightsError when one does not fit."""
        layers = load_layers(self._spec.layers[: self._spec.core_position], version, tensors)
        kernels = load_kernels(self._spec, version, tensors)
        core = load_core(self._spec, version, tensors)
        if layers and layers[-1][1].size != core.num_inputs:
            raise WeightsError(f"version {version}: its core takes {core.num_inputs} inputs")
        if len(self._spec.layers) > self._spec.core_position:
            weight_name = self._spec.layers[self._spec.core_position][0]
            weight = tensors.get(weight_name)
            if weight is not None and weight.shape[-1] != core.size:
                raise WeightsError(f"version {version}: {weight_name} takes {weight.shape[-1]} inputs")
        self._head.load(version, tensors)
        self._layers = layers
        self._kernels = kernels
        self._core = core

    def reset(self, stream: Hashable = 0) -> None:
        """The next observation of this stream begins an episode, from a state of zeros."""
        self._states.pop(stream, None)
        self._head.reset(stream)

    def get_extras(self, stream: Hashable = 0) -> Mapping[str, Any]:
        """What a segment carries with the next observation of this stream: the state before it. [S]"""
        return {STATE: self._get_state(stream)}

    def act(self, observation: np.ndarray, stream: Hashable = 0, mask: np.ndarray | None = None) -> tuple[Any, float]:
        """Sample an action; returns it with its log-probability. stream: the key of the episode; mask: its allowed
        choices."""
        output = self._step(np.asarray(observation)[None], [stream])[0]
        return self._head.act(output, stream, mask)

    def act_batch(self, observations: Rows, streams: Sequence[Hashable], masks: Masks = None) -> ActionBatch:
        """Sample an action for each of the observations [B, *obs]; returns them with their log-probabilities."""
        return self._head.act_batch(self._step(np.asarray(observations), streams), streams, masks)

    def compute_outputs(self, observations: Rows, streams: Sequence[Hashable] = ()) -> np.ndarray:
        """The outputs of the last layer [B, n] at observations [B, *obs] of these streams, whose states go on."""
        return self._head.compute_outputs(self._step(np.asarray(observations), streams))

    def _step(self, observations: np.ndarray, streams: Sequence[Hashable]) -> np.ndarray:
        """The core's outputs [B, H] at observations [B, *obs] of these streams, whose states go on."""
        if self._kernels:
            observations = compute_features(observations, self._spec, self._kernels)
        hidden = np.asarray(observations, np.float32)
        for weight, bias in self._layers:
            hidden = hidden @ weight.T + bias
            hidden = np.maximum(hidden, 0.0) if self._spec.activation == "relu" else np.tanh(hidden)
        states = self._core.step(hidden, np.stack([self._get_state(stream) for stream in streams]))
        self._states.update(zip(streams, states, strict=True))
        return states[:, : self._core.size]

    def _get_state(self, stream: Hashable) -> np.ndarray:
        state = self._states.get(stream)
        return np.zeros(self._core.state_size, np.float32) if state is None else state


class RecurrentCore:
    """One step of torch's GRU or LSTM, for one stream or a batch of them."""

    def __init__(
        self, kind: str, weight_x: np.ndarray, weight_h: np.ndarray, bias_x: np.ndarray, bias_h: np.ndarray
    ) -> None:
        self._kind = kind
        self.num_inputs = weight_x.shape[1]
        self.size = weight_h.shape[1]
        self.state_size = self.size * (2 if kind == "lstm" else 1)
        self._weight_x, self._weight_h = np.ascontiguousarray(weight_x.T), np.ascontiguousarray(weight_h.T)
        self._bias_x, self._bias_h = bias_x, bias_h

    def step(self, x: np.ndarray, state: np.ndarray) -> np.ndarray:
        """The next state [..., S] from inputs [..., num_inputs] and states [..., S]; the output is its first H."""
        size = self.size
        h = state[..., :size]
        from_x, from_h = x @ self._weight_x + self._bias_x, h @ self._weight_h + self._bias_h
        if self._kind == "gru":  # torch's order of gates: reset, update, new
            gates = _sigmoid(from_x[..., : 2 * size] + from_h[..., : 2 * size])
            new = np.tanh(from_x[..., 2 * size :] + gates[..., :size] * from_h[..., 2 * size :])
            next_h: np.ndarray = new + gates[..., size:] * (h - new)
            return next_h
        gates = from_x + from_h  # input, forget, cell, output
        admit, retain = _sigmoid(gates[..., :size]), _sigmoid(gates[..., size : 2 * size])
        c = retain * state[..., size:] + admit * np.tanh(gates[..., 2 * size : 3 * size])
        return np.concatenate([_sigmoid(gates[..., 3 * size :]) * np.tanh(c), c], axis=-1)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """Compute it by tanh, which does not overflow."""
    y: np.ndarray = 0.5 + 0.5 * np.tanh(0.5 * x)
    return y


def describe_head(spec: PolicySpec) -> PolicySpec:
    """The policy of the layers after the core, whose observations are the core's outputs."""
    return msgspec.structs.replace(
        spec,
        kind="mlp_" + spec.kind.removeprefix(PREFIX),
        layers=spec.layers[spec.core_position :],
        convolutions=(),
        core="",
        core_tensors=(),
        core_position=0,
    )


def load_layers(
    names: Sequence[tuple[str, str]], version: int, tensors: Mapping[str, np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(weight, bias) of consecutive layers. Raises WeightsError when one is missing or does not fit."""
    layers: list[tuple[np.ndarray, np.ndarray]] = []
    for weight_name, bias_name in names:
        if weight_name not in tensors or bias_name not in tensors:
            raise WeightsError(f"version {version} has no {weight_name!r} or no {bias_name!r}")
        weight, bias = tensors[weight_name], tensors[bias_name]
        if weight.ndim != 2 or bias.shape != weight.shape[:1]:
            raise WeightsError(f"version {version}: {weight_name} is {weight.shape}, its bias {bias.shape}")
        if layers and layers[-1][1].size != weight.shape[1]:
            raise WeightsError(f"version {version}: {weight_name} takes {weight.shape[1]} inputs")
        layers.append((np.ascontiguousarray(weight), bias))
    return layers


def load_core(spec: PolicySpec, version: int, tensors: Mapping[str, np.ndarray]) -> RecurrentCore:
    """The core of these weights. Raises WeightsError when one is missing or does not fit."""
    missing = [name for name in spec.core_tensors if name not in tensors]
    if missing or len(spec.core_tensors) != 4:
        raise WeightsError(f"version {version} has no {missing or '4 tensors of a core'}")
    weight_x, weight_h, bias_x, bias_h = (tensors[name] for name in spec.core_tensors)
    num_rows = NUM_GATES[spec.core] * weight_h.shape[-1]
    shapes = [weight_x.shape[:1], weight_h.shape[:1], bias_x.shape, bias_h.shape]
    if weight_x.ndim != 2 or weight_h.ndim != 2 or any(shape != (num_rows,) for shape in shapes):
        actual = [tensors[name].shape for name in spec.core_tensors]
        raise WeightsError(f"version {version}: the tensors of its {spec.core} are {actual}")
    return RecurrentCore(spec.core, weight_x, weight_h, bias_x, bias_h)
