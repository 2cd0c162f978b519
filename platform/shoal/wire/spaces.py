"""What an environment shows as it becomes flat: the same numbers as gymnasium's `flatten`, without gymnasium.

Used where a run describes its environment, and by policies that take observations as the game gives them.
Legend: B observations, F numbers of a flat one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from shoal.errors import ConfigError
from shoal.wire.action_masks import INFO_KEY
from shoal.wire.experience_spec import ExperienceSpec, SpaceSpec

PART = "Part"


def describe_space(space: Any, ignored: Sequence[str] = ()) -> SpaceSpec:
    """A gymnasium space as data. ignored: parts of a Dict that are not observed, as its action mask is not."""
    kind, shape = type(space).__name__, tuple(getattr(space, "shape", None) or ())
    if kind == "Dict":
        parts = {name: each for name, each in space.spaces.items() if name != INFO_KEY and name not in ignored}
        is_one = len(parts) == 1 < len(space.spaces)
        described = tuple(describe_space(each) for each in parts.values())
        return SpaceSpec(PART if is_one else kind, names=tuple(parts), parts=described)
    if kind == "Tuple":
        return SpaceSpec(kind, parts=tuple(describe_space(each) for each in space.spaces))
    if kind in ("Discrete", "MultiDiscrete"):
        values = space.n if kind == "Discrete" else space.nvec
        sizes, start = (tuple(np.ravel(each).astype(int).tolist()) for each in (values, space.start))
        return SpaceSpec(kind, shape, sizes, start)
    return SpaceSpec(kind, shape)


def flatten_observation(spec: ExperienceSpec, observation: Any) -> Any:
    """One observation as segments have it: a part of it, [F] or its Box; one that is flat already stays. Raises
    ConfigError for what is not of the run's space."""
    if spec.space is None:
        return observation
    containers = {PART: Mapping, "Dict": Mapping, "Tuple": tuple}
    container = containers.get(spec.space.kind)
    if not isinstance(observation, container) if container else np.shape(observation) == spec.observation.shape:
        return observation
    rows, is_batch = flatten_rows(spec.space, observation)
    return rows if is_batch else rows[0]


def flatten_rows(space: SpaceSpec, observation: Any) -> tuple[np.ndarray, bool]:
    """The rows of one observation, [1, F], or of a batch of them, [B, F]; a Box keeps its shape. Returns also whether
    it is a batch: its arrays have one dimension more than the space. Raises ConfigError for what is not of the
    space."""
    while space.kind == PART:
        observation, space = _get_part(observation, space.names[0]), space.parts[0]
    leaf, example = space, observation
    while leaf.parts:
        example, leaf = _get_part(example, leaf.names[0] if leaf.names else 0), leaf.parts[0]
    is_batch = np.ndim(example) > len(leaf.shape)
    if space.kind == "Box":
        rows = np.asarray(observation)
        _require_shape(rows, space, is_batch)
        return (rows if is_batch else rows[None]), is_batch
    return _flatten(space, observation, is_batch), is_batch


def _flatten(space: SpaceSpec, value: Any, is_batch: bool) -> np.ndarray:
    if space.kind in ("Dict", "Tuple"):
        keys: Sequence[Any] = space.names or range(len(space.parts))
        parts = [_flatten(each, _get_part(value, key), is_batch) for key, each in zip(keys, space.parts, strict=True)]
        return np.concatenate(parts, axis=1)
    array = np.asarray(value)
    _require_shape(array, space, is_batch)
    rows = array.reshape(len(array) if is_batch else 1, -1)
    if not space.sizes:
        return rows
    bounds = np.cumsum((0, *space.sizes))
    flat = np.zeros((len(rows), bounds[-1]), np.int64)
    for column, (begin, end) in enumerate(pairwise(bounds)):
        chosen = rows[:, column].astype(np.int64) - space.start[column]
        if chosen.size and (chosen.min() < 0 or chosen.max() >= end - begin):
            problem = f"has values from {rows[:, column].min()} to {rows[:, column].max()}"
            remedy = f"a {space.kind} has {space.sizes[column]}, from {space.start[column]} on"
            raise ConfigError("observation", space.kind, problem, remedy)
        flat[np.arange(len(rows)), begin + chosen] = 1
    return flat


def _get_part(value: Any, key: Any) -> Any:
    if isinstance(key, str) and not isinstance(value, Mapping):
        raise ConfigError("observation", type(value).__name__, f"has no part {key!r}", "give what the game gives")
    try:
        return value[key]
    except (KeyError, IndexError, TypeError):
        raise ConfigError("observation", key, "is missing", "give what the game gives") from None


def _require_shape(array: np.ndarray, space: SpaceSpec, is_batch: bool) -> None:
    if array.shape[int(is_batch) :] != space.shape or array.dtype.kind not in "biuf":
        wanted = f"{list(space.shape)} of numbers, or a batch of them"
        raise ConfigError("observation", f"{array.dtype} {list(array.shape)}", "is not the game's", f"give {wanted}")
