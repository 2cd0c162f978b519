"""Rows of observations, each the next one of an episode, checked against the spec: those of an `acts`, or the one of
an `act`.

Called by the gateway; the trust boundary of remote inference. Legend: N rows, K choices of a mask.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec
import numpy as np

from shoal.errors import InvalidSegment, ProtocolViolation
from shoal.wire.action_masks import check_choices, find_choices, read_mask
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
from shoal.wire.segment import LARGEST_REWARD, REWARD, DropReason, check_values

ROW_LAST = ROW_TERMINATED | ROW_TRUNCATED
_NO_MASKS = np.zeros((1, 0), np.bool_)


class ActRows(NamedTuple):
    """N rows, in columns.

    settings:     their versions; 0: the newest that were sent
    observations: [N, *obs]
    masks:        bool [N, K]; in a run without masks K is 0
    rewards:      [N]
    taken:        of a single row: the action of the step before, where it is not the answer
    """

    episodes: Sequence[int]
    steps: Sequence[int]
    settings: Sequence[int]
    observations: np.ndarray
    masks: np.ndarray
    rewards: Sequence[float] | np.ndarray
    flags: Sequence[int]
    taken: Any = msgspec.UNSET


class RowReader:
    """Reads and checks the rows of a run. choices: of an action's numbers, in a run with masks"""

    def __init__(self, experience: ExperienceSpec) -> None:
        self.choices = find_choices(experience)
        self._observation, self._dtype = experience.observation, experience.observation.numpy_dtype()
        self._row_shape = (1, *self._observation.shape)
        mask = TensorSpec("uint8", (sum(self.choices),))
        self._tensors = {"observation": self._observation}
        if self.choices:
            self._tensors["mask"] = TensorSpec("bool", mask.shape)
        self._columns = {"observations": self._observation, "rewards": TensorSpec("float32")}
        self._columns |= {"flags": TensorSpec("uint8")} | ({"masks": mask} if self.choices else {})
        self._sizes = [math.prod(spec.shape) * spec.numpy_dtype().itemsize for spec in self._tensors.values()]

    def read_one(self, message: ActMessage, frames: Sequence[bytes]) -> ActRows:
        """The row of an `act`. Raises InvalidSegment when the observation, its mask or the reward is outside of the
        spec."""
        if [len(frame) for frame in frames] != self._sizes:
            _raise_misfit(frames, self._tensors)
        if not -LARGEST_REWARD <= message.reward <= LARGEST_REWARD:  # NaN, too
            check_values("reward", np.array(message.reward), REWARD)
        observation = np.frombuffer(frames[0], self._dtype)
        check_values("observation", observation, self._observation)
        masks = np.frombuffer(frames[-1], np.bool_)[None] if self.choices else _NO_MASKS
        if self.choices and not message.terminated:  # after that, no action is chosen
            read_mask(np.frombuffer(frames[1], np.uint8), self.choices)
        flags = ROW_TERMINATED if message.terminated else 0
        if message.truncated:
            flags |= ROW_TRUNCATED
        if message.success is not msgspec.UNSET:
            flags |= ROW_TELLS_SUCCESS | (ROW_SUCCESS if message.success else 0)
        settings = 0 if message.settings is msgspec.UNSET else message.settings
        numbers = (message.episode,), (message.step,), (settings,)
        content = observation.reshape(self._row_shape), masks, (message.reward,)
        return ActRows(*numbers, *content, (flags,), message.taken)

    def read_many(self, message: ActsMessage, frames: Sequence[bytes]) -> tuple[ActRows, dict[int, InvalidSegment]]:
        """The rows of an `acts`, and what is outside of the spec in which of them. Raises ProtocolViolation for columns
        of another length."""
        num_rows = len(message.episodes)
        if not 0 < num_rows <= MAX_ROWS:
            raise ProtocolViolation("malformed", f"acts: {num_rows} rows, expected 1 to {MAX_ROWS}")
        settings = message.settings or (0,) * num_rows
        if not len(message.steps) == len(settings) == num_rows or len(frames) != len(self._columns):
            problem = (
                f"{num_rows} episodes, {len(message.steps)} steps and {len(frames)} tensors, expected as many steps "
            )
            raise ProtocolViolation("malformed", f"acts: {problem}as episodes, and {', '.join(self._columns)}")
        columns: list[np.ndarray] = []
        for (name, spec), frame in zip(self._columns.items(), frames, strict=True):
            dtype, number = spec.numpy_dtype(), num_rows * math.prod(spec.shape)
            if not frame and name in ("rewards", "flags"):
                frame = bytes(number * dtype.itemsize)
            if len(frame) != number * dtype.itemsize:
                came = f"{len(frame) / dtype.itemsize:g} numbers, expected {number}"
                shape = f"{spec.dtype} {[num_rows, *spec.shape]}"
                raise ProtocolViolation("malformed", f"acts: {name}: {came} ({shape})")
            columns.append(np.frombuffer(frame, dtype).reshape(num_rows, *spec.shape))
        observations, rewards, flags, *masks = columns

        def check(part: slice) -> None:
            check_values("reward", rewards[part], REWARD)
            check_values("observation", observations[part], self._observation)
            if self.choices:  # after a terminal state, no action is chosen
                check_choices(masks[0][part][flags[part] & ROW_TERMINATED == 0], self.choices)

        try:
            for each in (message.episodes, message.steps, message.settings):
                array("q", each)
        except OverflowError:
            raise ProtocolViolation("malformed", "acts: a number beyond 64 bits, with sign") from None
        allowed = masks[0] != 0 if masks else np.zeros((num_rows, 0), np.bool_)
        rows = ActRows(message.episodes, message.steps, settings, observations, allowed, rewards, flags.tolist())
        return rows, _find_invalid(check, num_rows)


def _raise_misfit(frames: Sequence[bytes], expected: Mapping[str, TensorSpec]) -> NoReturn:
    """Raise InvalidSegment, which names the first tensor that has not as many numbers as expected."""
    if len(frames) != len(expected):
        problem = f"{len(frames)} tensors, expected {len(expected)}: {' and '.join(expected)}"
        raise InvalidSegment(DropReason.INVALID_FRAMES, "observation", problem)
    for (name, spec), frame in zip(expected.items(), frames, strict=True):
        number, size = math.prod(spec.shape), spec.numpy_dtype().itemsize
        if len(frame) != number * size:
            came = f"{len(frame)} bytes, {size} a number" if len(frame) % size else f"{len(frame) // size} numbers"
            problem = f"{came}, expected {number} ({spec.dtype} {list(spec.shape)})"
            raise InvalidSegment(DropReason.INVALID_FRAMES, name, problem)
    raise AssertionError("all fit")


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
