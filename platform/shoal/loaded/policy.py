"""A registered policy that acts in a game's own loop: from what the game shows to what its `step` takes.

Computes in NumPy, as actors do, where the version has the format of its experience; otherwise by the model as it is
served. Legend: B observations, K choices of an action's numbers, end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from shoal.actor.policy import LOG_STD_LIMITS, make_policy
from shoal.errors import ConfigError
from shoal.registry import ModelVersion
from shoal.serve.model.action_sampler import make_sampler
from shoal.weights import decode_tensors
from shoal.wire import ExperienceSpec, SpaceSpec
from shoal.wire.action_masks import INFO_KEY
from shoal.wire.experience_spec import EXPERIENCE_FILE
from shoal.wire.spaces import flatten_rows

if TYPE_CHECKING:
    from shoal.serve.model.predictor import LoadedModel

MASKED_LOGIT = -np.inf
Outputs = Mapping[str, np.ndarray]  # by name, [B, ...] each


class Network(Protocol):
    """Computes the outputs of a policy by name, with the best `action` [B, *act]; keeps the states of streams."""

    def compute(self, rows: np.ndarray, streams: Sequence[Hashable], mask: np.ndarray | None) -> Outputs: ...

    def reset(self, stream: Hashable) -> None: ...


def open_policy(
    version: ModelVersion, open_model: Callable[[], LoadedModel], seed: int | None, *, as_served: bool = False
) -> Policy:
    """Raises ConfigError for a model that is no policy, WeightsError for a damaged one.

    open_model: needs torch; as_served: by this model, whose outputs are all there are, also where NumPy would do
    """
    signature = version.manifest.signature
    if "observation" not in {each.name for each in signature.inputs}:
        outputs = ", ".join(each.name for each in signature.outputs)
        raise ConfigError("model", version.ref, f"is no policy: its outputs are {outputs}", "use predict")
    experience, network = None, None
    if EXPERIENCE_FILE in version.manifest.files:
        stored = version.fetch_file(EXPERIENCE_FILE).read_bytes()
        experience = msgspec.json.decode(stored, type=ExperienceSpec)
        network = None if as_served else _open_in_numpy(version, experience)
    return Policy(version, experience, network or TorchNetwork(version, open_model()), seed)


def _open_in_numpy(version: ModelVersion, experience: ExperienceSpec) -> Network | None:
    """None for one that actors do not compute: an optimised version, a mixture, a graph without onnxruntime."""
    if not experience.policy.kind or "parent" in version.manifest.lineage:
        return None
    try:
        return NumPyNetwork(experience, version)
    except ConfigError:  # of a kind, or for a package, that is not here
        return None


class Policy:
    """experience: of the game; None for a version that was registered without it: its observations are flat."""

    def __init__(
        self, version: ModelVersion, experience: ExperienceSpec | None, network: Network, seed: int | None
    ) -> None:
        manifest = version.manifest
        inputs = {each.name: each.shape[1:] for each in manifest.signature.inputs}
        self._network, self._generator = network, np.random.default_rng(seed)
        self._sampler = make_sampler(manifest.model, manifest.signature, None)
        observed = experience.observation.shape if experience is not None else tuple(inputs["observation"])
        self._flat = SpaceSpec("Box", observed)
        self._space = (experience.space if experience is not None else None) or self._flat
        self._num_choices = inputs.get(INFO_KEY, [0])[0]
        self._dtype = experience.action.numpy_dtype() if experience is not None else None
        self._last: Any = None
        self._streams: dict[Hashable, list[Hashable]] = {}  # of the rows of each stream's newest batch

    def act(self, observation: Any, deterministic: bool | None, mask: Any, stream: Hashable) -> Any:
        """See `LocalModel.act`."""
        return self.decide(observation, deterministic, mask, stream)[0]

    def decide(
        self, observation: Any, deterministic: bool | None, mask: Any, stream: Hashable, *, is_flat: bool = False
    ) -> tuple[Any, Outputs]:
        """See `LocalModel.decide`."""
        rows, is_batch = flatten_rows(self._flat if is_flat else self._space, observation)
        if self._num_choices:
            mask = self._read_mask(observation, mask, len(rows))
        streams: list[Hashable] = [(stream, row) for row in range(len(rows))]
        self._streams[stream] = streams
        outputs = self._network.compute(rows, streams, mask if self._num_choices else None)
        actions, sampler = outputs["action"], self._sampler
        if sampler is not None and (sampler.is_default if deterministic is None else not deterministic):
            actions = sampler.draw(outputs, self._generator)
        if is_batch or actions.ndim > 1:
            actions = actions if self._dtype is None else actions.astype(self._dtype, copy=False)
            return actions if is_batch else actions[0], outputs
        return int(actions[0]), outputs

    def _read_mask(self, observation: Any, mask: Any, num_rows: int) -> np.ndarray:
        if mask is None and isinstance(observation, Mapping):
            mask = observation.get(INFO_KEY)
        if mask is None:
            problem = f"is missing: this policy chooses among {self._num_choices} that may be forbidden"
            raise ConfigError("mask", None, problem, f'act(observation, mask=info["{INFO_KEY}"])')
        allowed = np.asarray(mask, np.bool_).reshape(-1, self._num_choices)
        if len(allowed) != num_rows:
            raise ConfigError(
                "mask", list(np.shape(mask)), f"is not [{num_rows}, {self._num_choices}]", "give one each"
            )
        return allowed

    def reset(self, stream: Hashable | None, rows: Sequence[bool] | np.ndarray | None) -> None:
        """See `LocalModel.reset`."""
        for each in list(self._streams) if stream is None else [stream]:
            known = self._streams.get(each, [])
            for row in known if rows is None else [known[index] for index in np.flatnonzero(rows)]:
                self._network.reset(row)


class NumPyNetwork:
    """As an actor computes it. Raises ConfigError for what is unknown here, WeightsError for weights that do not
    fit."""

    def __init__(self, experience: ExperienceSpec, version: ModelVersion) -> None:
        spec, action = experience.policy, experience.action
        self._policy = make_policy(spec, action_shape=action.shape)
        tensors = decode_tensors(version.snapshot().payload)
        self._policy.load(version.version, tensors)
        self._shape = action.shape
        self._bounds = np.cumsum((0, *(spec.action_sizes or (int(action.high or 0) + 1,))))
        self._is_gaussian = bool(spec.action_low)
        if self._is_gaussian:
            self._low, self._high = (np.array(each) for each in (spec.action_low, spec.action_high))
            self._log_std = tensors[spec.log_std] if spec.log_std else None

    def compute(self, rows: np.ndarray, streams: Sequence[Hashable], mask: np.ndarray | None) -> Outputs:
        outputs = self._policy.compute_outputs(rows, streams)
        if self._is_gaussian:
            return self._describe_gaussian(outputs)
        if mask is not None:
            outputs = np.where(mask, outputs, np.float32(MASKED_LOGIT))
        if not self._shape:
            return {"action": outputs.argmax(1), "logits": outputs}
        best = [outputs[:, begin:end].argmax(1) for begin, end in pairwise(self._bounds)]
        return {"action": np.stack(best, 1).reshape(-1, *self._shape), "logits": outputs}

    def _describe_gaussian(self, outputs: np.ndarray) -> Outputs:
        size = self._low.size
        mean = outputs[:, :size]
        log_std = np.broadcast_to(self._log_std, mean.shape) if self._log_std is not None else outputs[:, size:]
        center, half = (self._low + self._high) / 2, (self._high - self._low) / 2
        action = np.clip(center + half * np.tanh(mean), self._low, self._high).astype(np.float32)
        shaped = action.reshape(-1, *self._shape)
        return {"action": shaped, "mean": mean, "log_std": np.clip(log_std, *LOG_STD_LIMITS)}

    def reset(self, stream: Hashable) -> None:
        self._policy.reset(stream)


class TorchNetwork:
    """As an endpoint computes it."""

    def __init__(self, version: ModelVersion, model: LoadedModel) -> None:
        self._model = model
        shapes = {each.name: each.shape for each in version.manifest.signature.inputs}
        self._state_size = shapes["state"][1] if "state" in shapes else 0
        self._states: dict[Hashable, np.ndarray] = {}

    def compute(self, rows: np.ndarray, streams: Sequence[Hashable], mask: np.ndarray | None) -> Outputs:
        inputs = {"observation": np.ascontiguousarray(rows, np.float32)}
        if self._state_size:
            fresh = np.zeros(self._state_size, np.float32)
            inputs["state"] = np.stack([self._states.get(each, fresh) for each in streams])
        if mask is not None:
            inputs[INFO_KEY] = mask
        outputs = self._model.predict(inputs)
        if self._state_size:
            self._states.update(zip(streams, outputs["next_state"], strict=True))
        return outputs

    def reset(self, stream: Hashable) -> None:
        self._states.pop(stream, None)
