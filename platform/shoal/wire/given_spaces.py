"""Spaces that are given as data, and not by an environment: by `env=` of a run, or by a game in its `hello`.

    {observation: [4], action: 3}                                      four float32 numbers, three choices
    {observation: {shape: [84, 84, 1], dtype: uint8}, action: [3, 2]}  frames; two choices, of three and of two
    {observation: [8], action: {shape: [2], low: -1, high: 1}}         two numbers within bounds
    {observation: [8], action: [{low: -1, high: 1}, 3]}                a number and one of 3 choices: `floor_choices`
    {name: catch, observation: [4], action: 3, masks: true}            the game says which choices are allowed

Knows neither gymnasium nor YAML. Errors are ConfigErrors that name the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.errors import ConfigError, suggest
from shoal.wire.action_masks import find_choices
from shoal.wire.experience_spec import DTYPES, ExperienceSpec

MAX_NUMBERS = 2**24  # of an observation or an action: a message has room for no more
MAX_CHOICES = 2**20  # of all numbers of an action: each is an output of the policy
_FIELDS = ("name", "observation", "action", "masks")
_ACTIONS = (
    "3 for three choices, [3, 2] for several, {shape: [2], low: -1, high: 1} for numbers, or [{low: -1, high: 1}, 2]"
)
_OBSERVATIONS = "[4] for four numbers, or {shape: [84, 84, 1], dtype: uint8, low: 0, high: 255}"


@dataclass(frozen=True)
class Box:
    """Numbers within bounds, as gymnasium has them. low, high: of `shape`"""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    low: np.ndarray
    high: np.ndarray

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} from {self.low.min():g} to {self.high.max():g}"


@dataclass(frozen=True)
class Discrete:
    """One of `n` choices, from 0 on."""

    n: int
    start: int = 0
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.n} choices"


@dataclass(frozen=True)
class MultiDiscrete:
    """Several choices, of `nvec` each, from 0 on."""

    nvec: np.ndarray
    start: int = 0
    dtype: np.dtype[Any] = np.dtype("int64")  # noqa: RUF009 - immutable

    @property
    def shape(self) -> tuple[int, ...]:
        return self.nvec.shape

    def __str__(self) -> str:
        return f"choices of {self.nvec.tolist()}"


@dataclass(frozen=True)
class GivenSpaces:
    """What a game shows and takes. has_masks: with each observation it says which choices are allowed"""

    observation: Box
    action: Box | Discrete | MultiDiscrete
    has_masks: bool = False
    name: str = ""

    @classmethod
    def parse(cls, values: Any, field: str = "") -> GivenSpaces:
        """Read the short forms. field: where they stand, for errors, as `policies.prey.`. Raises ConfigError."""
        if not isinstance(values, Mapping):
            raise ConfigError(field.strip(".") or "spaces", values, "is no mapping", "give observation and action")
        _require_known(values, _FIELDS, field)
        for name, forms in (("observation", _OBSERVATIONS), ("action", _ACTIONS)):
            if name not in values:
                raise ConfigError(f"{field}{name}", None, "is missing", f"give {forms}")
        has_masks, name = values.get("masks", False), values.get("name", "")
        if not isinstance(has_masks, bool):
            raise ConfigError(f"{field}masks", has_masks, "is neither true nor false")
        if not isinstance(name, str) or len(name) > 64 or not name.isprintable():
            raise ConfigError(f"{field}name", name, "is no name", "give a word of at most 64 characters")
        observation = _read_box(values["observation"], f"{field}observation", _OBSERVATIONS)
        action = _read_action(values["action"], f"{field}action")
        if has_masks and isinstance(action, Box):
            problem = "are for choices, not for continuous actions"
            raise ConfigError(f"{field}masks", True, problem, f"leave masks out, or give action as {_ACTIONS}")
        return cls(observation, action, has_masks, name)

    def make_first_observation(self) -> np.ndarray:
        """An observation of the space, before any has come: zero, or the bound that is nearest."""
        space = self.observation
        return np.clip(np.zeros(space.shape), space.low, space.high).astype(space.dtype)


def read_choices(form: Any) -> list[Any]:
    """Of each part of an action in this form how many choices it has, 0 of a number; [] of an action without both."""
    choices = [0 if isinstance(each, Mapping) else each for each in form] if isinstance(form, list | tuple) else []
    return choices if 0 in choices else []


def floor_choices(action: Any, choices: Sequence[int]) -> Any:
    """The policy's numbers as the game takes them: of a choice among n, which is from 0 to n, the whole part."""
    if not choices:
        return action
    return [min(int(each), num - 1) if num else each for each, num in zip(action, choices, strict=True)]


def center_choices(taken: Any, choices: Sequence[int]) -> Any:
    """The numbers of what a game has taken, of a choice the middle of those that mean it."""
    if taken is None or not choices:
        return taken
    return [each + 0.5 if num else each for each, num in zip(taken, choices, strict=True)]


def find_wrong_spaces(offers: Mapping[str, Any], experience: ExperienceSpec) -> str:
    """Where what a game offers is not what the run has: the field and both values; "" where all fields are equal. A
    field that is left out is not compared, but for the dtype of observations, which is float32 then."""
    try:
        given = GivenSpaces.parse(offers)
    except ConfigError as error:
        return str(error)
    run = _describe_run(experience)
    stated = {"shape", "dtype", *_list_stated(offers["observation"])}
    problem = _compare_boxes("observation", given.observation, run.observation, stated)
    if isinstance(given.action, Box) and isinstance(run.action, Box):
        stated = {"shape", *(_list_stated(offers["action"]) or ("low", "high"))}
        problem = problem or _compare_boxes("action", given.action, run.action, stated)
    elif str(given.action) != str(run.action):
        problem = problem or _describe_difference("action", given.action, run.action)
    if "dtype" in _list_stated(offers["action"]) and offers["action"]["dtype"] != experience.action.dtype:
        problem = problem or _describe_difference("action.dtype", offers["action"]["dtype"], experience.action.dtype)
    if "masks" in offers and given.has_masks != run.has_masks:
        problem = problem or _describe_difference("masks", given.has_masks, run.has_masks)
    return problem


def _describe_run(experience: ExperienceSpec) -> GivenSpaces:
    """The spaces of a run, as data."""
    observed = experience.observation
    acted = experience.action
    policy = experience.policy
    has_masks = bool(find_choices(experience))
    observation = _make_box(
        observed.shape,
        observed.numpy_dtype(),
        -np.inf if observed.low is None else observed.low,
        np.inf if observed.high is None else observed.high,
    )
    action: Box | Discrete | MultiDiscrete
    if policy.action_low:
        action = _make_box(
            acted.shape,
            acted.numpy_dtype(),
            np.reshape(policy.action_low, acted.shape),
            np.reshape(policy.action_high, acted.shape),
        )
    elif policy.action_sizes:
        action = MultiDiscrete(np.reshape(policy.action_sizes, acted.shape))
    else:
        action = Discrete(int(acted.high or 0) + 1)
    return GivenSpaces(observation, action, has_masks)


def _compare_boxes(field: str, game: Box, run: Box, stated: set[str]) -> str:
    for name in ("dtype", "shape"):
        theirs, ours = getattr(game, name), getattr(run, name)
        if name in stated and theirs != ours:
            return _describe_difference(
                f"{field}.{name}", *(list(each) if name == "shape" else each for each in (theirs, ours))
            )
    for name, reduce in (("low", np.min), ("high", np.max)):
        theirs, ours = getattr(game, name), getattr(run, name)
        if field == "observation":  # of which a run knows one bound for all numbers
            theirs, ours = reduce(theirs), reduce(ours)
        if name in stated and not np.allclose(theirs, ours, rtol=1e-6, atol=0):
            return _describe_difference(f"{field}.{name}", *(np.unique(each).tolist() for each in (theirs, ours)))
    return ""


def _describe_difference(field: str, game: Any, run: Any) -> str:
    return f"{field}: this game has {game}, and the run {run}"


def _list_stated(form: Any) -> set[str]:
    return set(form) if isinstance(form, Mapping) else set()


def _read_action(form: Any, field: str) -> Box | Discrete | MultiDiscrete:
    if type(form) is int:  # a bool is none
        return Discrete(_require_choices([form], field, form)[0])
    if choices := read_choices(form):
        _require_choices([num for num in choices if num], field, form)
        bounds = [each if isinstance(each, Mapping) else {"low": 0, "high": each} for each in form]
        for each in bounds:
            _require_known(each, ("low", "high"), f"{field}.")
        ends = {name: [each.get(name) for each in bounds] for name in ("low", "high")}
        return _read_action({"shape": [len(form)], **ends}, field)
    if isinstance(form, list | tuple):
        return MultiDiscrete(np.array(_require_choices(form, field, form)))
    if not isinstance(form, Mapping):
        raise ConfigError(field, form, "is no action space", f"give {_ACTIONS}")
    if not str(form.get("dtype", "float32")).startswith(("int", "uint")):
        box = _read_box(form, field, _ACTIONS)
        for name, bound in (("low", box.low), ("high", box.high)):
            if not np.isfinite(bound).all():
                problem = "is missing: each number of an action needs bounds"
                raise ConfigError(f"{field}.{name}", form.get(name), problem, f"give {_ACTIONS}")
        return box
    _require_known(form, ("shape", "dtype", "low", "high"), f"{field}.")
    shape, high = _read_shape(form.get("shape", []), f"{field}.shape", _ACTIONS), form.get("high")
    if form.get("low", 0) != 0:
        raise ConfigError(f"{field}.low", form["low"], "is not 0, from which choices count")
    if not isinstance(high, int | float) or isinstance(high, bool) or not 0 <= high < MAX_CHOICES or high % 1:
        raise ConfigError(f"{field}.high", high, "is no choice", "give the largest choice: 2 for three choices")
    sizes = _require_choices([int(high) + 1] * math.prod(shape), field, form)
    return MultiDiscrete(np.reshape(sizes, shape)) if shape else Discrete(sizes[0])


def _require_choices(sizes: Sequence[Any], field: str, form: Any) -> list[int]:
    if not sizes or not all(type(each) is int and each > 0 for each in sizes):
        raise ConfigError(field, form, "is no number of choices", f"give {_ACTIONS}")
    if sum(sizes) > MAX_CHOICES:
        raise ConfigError(field, form, f"has {sum(sizes):,} choices, at most {MAX_CHOICES:,}")
    return list(sizes)


def _read_box(form: Any, field: str, forms: str) -> Box:
    if isinstance(form, list | tuple):
        form = {"shape": form}
    if not isinstance(form, Mapping) or "shape" not in form:
        raise ConfigError(field, form, "is no space of numbers with a shape", f"give {forms}")
    _require_known(form, ("shape", "dtype", "low", "high"), f"{field}.")
    shape, name = _read_shape(form["shape"], f"{field}.shape", forms), form.get("dtype", "float32")
    if not isinstance(name, str) or name not in DTYPES or name == "bool":
        remedy = "give uint8, low: 0 and high: 1" if name == "bool" else suggest(str(name), DTYPES, ", ".join(DTYPES))
        raise ConfigError(f"{field}.dtype", name, "is no dtype of numbers", remedy)
    dtype = np.dtype(DTYPES[name])
    is_small = dtype.kind in "iu" and dtype.itemsize <= 2  # all of its values are meant
    ends = (np.iinfo(dtype).min, np.iinfo(dtype).max) if is_small else (-np.inf, np.inf)
    bounds = [
        _read_bound(form.get(each), end, shape, f"{field}.{each}")
        for each, end in zip(("low", "high"), ends, strict=True)
    ]
    box = _make_box(shape, dtype, *bounds)
    if not (box.low < box.high).all():
        low, high = form.get("low"), form.get("high")
        raise ConfigError(f"{field}.low", low, f"is not below high = {high}")
    return box


def _read_shape(shape: Any, field: str, forms: str) -> tuple[int, ...]:
    is_list = isinstance(shape, list | tuple)
    if not is_list or not all(type(each) is int and each > 0 for each in shape):
        raise ConfigError(field, shape, "is no shape: a list of positive integers", f"give {forms}")
    if len(shape) > 8 or math.prod(shape) > MAX_NUMBERS:
        raise ConfigError(field, shape, f"has more than {MAX_NUMBERS:,} numbers, or more than 8 axes")
    return tuple(shape)


def _read_bound(value: Any, default: float, shape: tuple[int, ...], field: str) -> np.ndarray:
    """One number for all, or a list with one for each."""
    try:
        bound = np.asarray(default if value is None else value)
        np.broadcast_to(bound, shape)
    except ValueError:
        bound = np.array("")
    if bound.dtype.kind not in "iuf":
        raise ConfigError(field, value, f"is no number, and no {list(shape)} of numbers")
    if value is not None and not np.isfinite(bound).all():
        raise ConfigError(field, value, "is not finite", "leave it out where there is no bound")
    return bound


def _make_box(shape: tuple[int, ...], dtype: np.dtype[Any], low: Any, high: Any) -> Box:
    kept = dtype if dtype.kind == "f" else np.dtype("f8")
    return Box(shape, dtype, *(np.broadcast_to(np.asarray(each, kept), shape) for each in (low, high)))


def _require_known(values: Mapping[str, Any], known: Sequence[str], field: str) -> None:
    for name in values:
        if name not in known:
            remedy = suggest(str(name), known, f"fields are: {', '.join(known)}")
            raise ConfigError(f"{field}{name}", values[name], "no such field", remedy)
