"""The content of an `acts` message: the columns of its rows, checked against the spec.

Called by the gateway; the trust boundary of remote inference for many agents. Legend: N rows, K choices of a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from shoal.errors import InvalidSegment, ProtocolViolation
from shoal.wire.action_masks import check_choices
from shoal.wire.experience_spec import ExperienceSpec, TensorSpec
from shoal.wire.messages import (
    MAX_ROWS,
    ROW_SUCCESS,
    ROW_TELLS_SUCCESS,
    ROW_TERMINATED,
    ROW_TRUNCATED,
    ActMessage,
    ActsMessage,
)
from shoal.wire.segment import REWARD, check_values


class ActRows(NamedTuple):
    """The content of an `acts`: observations [N, *obs], rewards float32 [N], flags uint8 [N], masks bool [N, K].
    settings: int64 [N]; 0: the newest that were sent"""

    episodes: Sequence[int]
    numbers: np.ndarray  # the same, int64 [N]
    steps: np.ndarray
    settings: np.ndarray
    observations: np.ndarray
    rewards: np.ndarray
    flags: np.ndarray
    masks: np.ndarray

    @property
    def are_last(self) -> np.ndarray:
        """Whether the episode ended after the step before. [N]"""
        ended: np.ndarray = (self.flags & (ROW_TERMINATED | ROW_TRUNCATED)) != 0
        return ended

    def to_act(self, row: int, has_masks: bool) -> tuple[ActMessage, list[bytes]]:
        """A row as a message of its own."""
        flags = int(self.flags[row])
        message = ActMessage(
            self.episodes[row],
            int(self.steps[row]),
            float(self.rewards[row]),
            bool(flags & ROW_TERMINATED),
            bool(flags & ROW_TRUNCATED),
            bool(flags & ROW_SUCCESS) if flags & ROW_TELLS_SUCCESS else msgspec.UNSET,
        )
        return message, [self.observations[row].tobytes(), *([self.masks[row].tobytes()] if has_masks else [])]


def read_rows(
    message: ActsMessage, frames: Sequence[bytes], experience: ExperienceSpec, choices: tuple[int, ...]
) -> tuple[ActRows, dict[int, InvalidSegment]]:
    """The rows, and what is outside of the spec in which of them. Raises ProtocolViolation for columns of another
    length. choices: of an action's numbers, in a run with masks"""
    num_rows = len(message.episodes)
    if not 0 < num_rows <= MAX_ROWS:
        raise ProtocolViolation("malformed", f"acts: {num_rows} rows, expected 1 to {MAX_ROWS}")
    specs = [experience.observation, TensorSpec("float32"), TensorSpec("uint8"), TensorSpec("uint8", (sum(choices),))]
    expected = dict(zip(("observations", "rewards", "flags", "masks")[: 4 if choices else 3], specs, strict=False))
    given_settings = message.settings or (0,) * num_rows
    if not len(message.steps) == len(given_settings) == num_rows or len(frames) != len(expected):
        problem = f"{num_rows} episodes, {len(message.steps)} steps and {len(frames)} tensors, expected as many steps "
        raise ProtocolViolation("malformed", f"acts: {problem}as episodes, and {', '.join(expected)}")
    columns: list[np.ndarray] = []
    for (name, spec), frame in zip(expected.items(), frames, strict=True):
        dtype, number = spec.numpy_dtype(), num_rows * math.prod(spec.shape)
        if not frame and name in ("rewards", "flags"):
            frame = bytes(number * dtype.itemsize)
        if len(frame) != number * dtype.itemsize:
            came = f"{len(frame) / dtype.itemsize:g} numbers, expected {number}"
            shape = f"{spec.dtype} {[num_rows, *spec.shape]}"
            raise ProtocolViolation("malformed", f"acts: {name}: {came} ({shape})")
        columns.append(np.frombuffer(frame, dtype).reshape(num_rows, *spec.shape))
    observations, rewards, flags = columns[:3]
    masks = columns[3] if choices else np.zeros((num_rows, 0), np.uint8)

    def check(part: slice) -> None:
        check_values("reward", rewards[part], REWARD)
        check_values("observation", observations[part], experience.observation)
        if choices:  # after a terminal state, no action is chosen
            check_choices(masks[part][flags[part] & ROW_TERMINATED == 0], choices)

    try:
        numbers, steps, versions = np.array([message.episodes, message.steps, given_settings], np.int64)
    except OverflowError:
        raise ProtocolViolation("malformed", "acts: a number beyond 64 bits, with sign") from None
    rows = ActRows(message.episodes, numbers, steps, versions, observations, rewards, flags, masks != 0)
    return rows, _find_invalid(check, num_rows)


def _find_invalid(check: Callable[[slice], None], num_rows: int) -> dict[int, InvalidSegment]:
    """The error of each row that has one: of all together, if there is none."""
    try:
        check(slice(None))
    except InvalidSegment:
        invalid = {}
        for row in range(num_rows):
            try:
                check(slice(row, row + 1))
            except InvalidSegment as error:
                invalid[row] = error
        return invalid
    return {}
