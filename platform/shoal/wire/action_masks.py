"""Action masks: which actions are allowed at an observation. They travel as the extra "masks" of each observation.

Used by actors, which read a mask from their environment, and by the gateway, which checks those of a segment.
Legend: L steps of a segment, K the choices of an action's numbers, end to end: n of a Discrete.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shoal.errors import InvalidSegment
from shoal.wire.experience_spec import ExperienceSpec, ExtraSpec, TensorSpec

MASKS = "masks"
INFO_KEY = "action_mask"  # of an environment's info or of its Dict observation, as gymnasium and PettingZoo have it


def describe_masks(action: TensorSpec, action_sizes: tuple[int, ...]) -> ExtraSpec:
    """The extra of a run with masks: bool [K] of each observation."""
    return ExtraSpec(MASKS, TensorSpec("bool", (sum(_find_sizes(action, action_sizes)),)), "observation")


def find_choices(spec: ExperienceSpec) -> tuple[int, ...]:
    """The number of choices of each number of an action, in a run with masks; () in a run without."""
    if not any(each.name == MASKS for each in spec.extras):
        return ()
    return _find_sizes(spec.action, spec.policy.action_sizes)


def read_mask(mask: Any, choices: tuple[int, ...]) -> np.ndarray:
    """An environment's mask as bool [K]; its numbers are 0 or 1. Raises InvalidSegment for another shape, dtype or
    number, or where no choice is allowed."""
    given = np.asarray(mask)
    if given.dtype.kind not in "biu":
        raise InvalidSegment("invalid_dtype", MASKS, f"{given.dtype}, expected bool or integers")
    if given.shape != (sum(choices),):
        raise InvalidSegment("invalid_shape", MASKS, f"{given.shape}, expected ({sum(choices)},)")
    check_choices(given, choices)
    return given.astype(np.bool_)


def check_choices(masks: np.ndarray, choices: tuple[int, ...]) -> None:
    """Raise InvalidSegment for masks [..., K] with other numbers than 0 and 1, or where no choice is allowed."""
    if masks.dtype.kind != "b" and ((masks != 0) & (masks != 1)).any():
        raise InvalidSegment("invalid_range", MASKS, "numbers other than 0 and 1")
    if not _has_choice(masks != 0, choices).all():
        raise InvalidSegment("invalid_range", MASKS, "no action is allowed")


def check_masks(actions: np.ndarray, masks: np.ndarray, terminated: bool, spec: ExperienceSpec) -> None:
    """Raise InvalidSegment unless each of `actions` [L, *act] is allowed by its row of `masks` [L+1, K], and the last
    row, too, allows one, which need not be where the episode terminated."""
    choices = find_choices(spec)
    chosen = actions.reshape(len(actions), -1) + np.cumsum((0, *choices[:-1]))
    is_allowed = np.take_along_axis(masks[:-1], chosen.astype(np.int64), 1).all(1)
    if not is_allowed.all():
        step = int(np.argmin(is_allowed))
        problem = f"action {actions[step].tolist()} of step {step} is not allowed by its mask"
        if not _has_choice(masks[step], choices).all():
            problem = f"no action is allowed at step {step}"
        raise InvalidSegment("invalid_range", MASKS, problem)
    if not terminated and not _has_choice(masks[-1], choices).all():
        raise InvalidSegment("invalid_range", MASKS, "no action is allowed after the last step")


def _find_sizes(action: TensorSpec, action_sizes: tuple[int, ...]) -> tuple[int, ...]:
    return action_sizes or (int(action.high or 0) + 1,) * math.prod(action.shape)


def _has_choice(masks: np.ndarray, choices: tuple[int, ...]) -> np.ndarray:
    """Find, for each number of an action, whether masks [..., K] allow any choice."""
    return np.logical_or.reduceat(masks, np.cumsum((0, *choices[:-1])), axis=-1)
