"""The steps of an episode become segments. Called by the ready loop, and by games with a loop of their own."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.errors import InvalidSegment
from shoal.wire import DropReason, ExperienceSpec, Segment, TensorSpec
from shoal.wire.experience_spec import NO_EXTRAS
from shoal.wire.segment import LARGEST_FLOAT32


def convert_rows(name: str, rows: np.ndarray, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Rows of the run's dtype. Raises InvalidSegment for another shape, for no numbers, and, if the run's are integers,
    for others."""
    if rows.shape != shape:
        raise InvalidSegment(DropReason.INVALID_SHAPE, name, f"{rows.shape}, expected {shape}")
    is_integral = dtype.kind in "iu"
    if rows.dtype is dtype or (not is_integral and rows.dtype.kind in "iufb"):
        return rows.astype(dtype, copy=False)
    if not is_integral or rows.dtype.kind not in "iub":  # a conversion would truncate or wrap values
        raise InvalidSegment(DropReason.INVALID_DTYPE, name, f"{rows.dtype}, expected {dtype}")
    converted = rows.astype(dtype)
    if not np.array_equal(converted, rows):
        raise InvalidSegment(DropReason.INVALID_RANGE, name, f"from {rows.min()} to {rows.max()}, expected {dtype}")
    return converted


def require_numbers(field: str, values: Any, agent: Hashable, size: int = 1) -> None:
    """Raise InvalidSegment for the first of an agent's `values` that is no number, or not finite in float32; or for
    more or fewer than `size`."""
    of_agent = "" if agent is None else f" of agent {agent}"
    array = np.asarray(values, None if isinstance(values, np.ndarray) else object)
    if array.size != size:
        raise InvalidSegment(DropReason.INVALID_SHAPE, field + of_agent, f"{array.size} numbers, expected {size}")
    if array.dtype.kind in "biuf" and float(np.abs(array).max(initial=0)) <= LARGEST_FLOAT32:
        return
    for index, each in enumerate(array.ravel()):
        try:
            number = None if isinstance(each, np.complexfloating) else math.fabs(each)  # takes no text, as float() does
        except TypeError:
            number = None
        except OverflowError:  # of an int
            number = np.inf
        if number is not None and number <= LARGEST_FLOAT32:
            continue
        problem = "no number" if number is None else "NaN" if number != number else "infinite in float32"
        position = f"{field}[{index}]" if array.ndim else field
        raise InvalidSegment(DropReason.NON_FINITE, position + of_agent, problem)


class _RowBuffer:
    """Rows of one tensor, as bytes: a copy, since an environment may reuse one array for every step, and the cheapest
    one."""

    def __init__(self, name: str, spec: TensorSpec, num_rows: int) -> None:
        self._name = name
        self._shape = spec.shape
        self._dtype = spec.numpy_dtype()
        self.rows = [b""] * num_rows

    def store(self, index: int, row: Any) -> None:
        """Copy it, with checks: NumPy would broadcast a scalar to a row, and wrap 300 to 44 in bytes."""
        if not isinstance(row, np.ndarray) or row.dtype is not self._dtype or row.shape != self._shape:
            try:
                array = np.asarray(row)
            except ValueError:
                problem = f"a list of parts of several sizes, expected {self._shape}"
                raise InvalidSegment(DropReason.INVALID_SHAPE, self._name, problem) from None
            row = convert_rows(self._name, array, self._dtype, self._shape)
        self.rows[index] = row.tobytes()

    def take(self, num_rows: int, next_first: int) -> np.ndarray:
        """The first `num_rows`; the row `next_first` becomes the first."""
        taken = np.frombuffer(bytearray().join(self.rows[:num_rows]), self._dtype).reshape(num_rows, *self._shape)
        self.rows[0] = self.rows[next_first]
        return taken


class SegmentBuilder:
    """Collects the steps of one episode into segments of at most `segment_length` steps.

    Each observation comes with its extras, if the run has some: a mapping of their names to rows. Of those that belong
    to a segment, only the row of its first observation is stored.
    """

    def __init__(self, spec: ExperienceSpec) -> None:
        self._spec = spec
        self._return, self._length = 0.0, 0  # of the episode, up to the segment
        self._segment_length = spec.segment_length
        self._observations = _RowBuffer("observation", spec.observation, spec.segment_length + 1)
        self._extras = [
            (each, _RowBuffer(each.name, each.tensor, max(2, each.count_rows(spec.segment_length))))
            for each in spec.extras
        ]
        self._steps: list[tuple[Any, float, float, int]] = []  # action, reward, log-probability, version

    def begin(self, observation: Any, extras: Mapping[str, Any] = NO_EXTRAS) -> None:
        """Set the first observation of an episode. Raises InvalidSegment for a wrong shape, and, if the run's
        observations are integers, for other values or values out of range; likewise for its extras."""
        self._observations.store(0, observation)
        if self._extras or extras:
            self._store_extras(0, extras)
        self._steps = []
        self.restart()

    def step(
        self,
        action: Any,
        log_probability: float,
        version: int,
        reward: float,
        observation: Any,
        terminated: bool,
        truncated: bool,
        extras: Mapping[str, Any] = NO_EXTRAS,
    ) -> Segment | None:
        """Add a step and the observation after it; returns a segment when one is complete.

        `observation` after a truncated or terminated step is the episode's real final one; then call `begin`. Raises
        InvalidSegment as `begin` does, and for actions of another kind or shape than the run's.
        """
        # Expensive checks wait for the end of the segment: this runs at every step of a possibly very fast environment.
        num_steps = len(self._steps) + 1
        self._observations.store(num_steps, observation)  # first: a rejected observation adds no step
        if self._extras or extras:
            self._store_extras(num_steps, extras)
        self._steps.append((action, reward, log_probability, version))
        if not (terminated or truncated or num_steps == self._segment_length):
            return None
        return self._complete(terminated, truncated)

    def take_segment(self) -> Segment | None:
        """The steps since the last segment as one; the next begins at the present observation. None without a step."""
        return self._complete(terminated=False, truncated=False) if self._steps else None

    def _complete(self, terminated: bool, truncated: bool) -> Segment:
        num_steps = len(self._steps)
        steps, self._steps = self._steps, []
        taken = {}
        for each, buffer in self._extras:
            num_rows = each.count_rows(num_steps)
            taken[each.name] = buffer.take(num_rows, next_first=max(num_rows - 1, 1))
        observations = self._observations.take(num_steps + 1, next_first=num_steps)
        actions, rewards, log_probabilities, versions = zip(*steps, strict=True)
        return self.make_segment(
            observations, actions, rewards, log_probabilities, versions, terminated, truncated, taken
        )

    def restart(self) -> None:
        """Begin an episode."""
        self._return, self._length = 0.0, 0

    def count(self, rewards: Sequence[float]) -> None:
        """Count steps, with these rewards, as the episode's."""
        self._return = float(sum(rewards, self._return))
        self._length += len(rewards)

    def make_segment(
        self,
        observations: np.ndarray,
        actions: Sequence[Any],
        rewards: Sequence[float],
        log_probabilities: Sequence[float],
        versions: Sequence[int],
        terminated: bool,
        truncated: bool,
        extras: Mapping[str, np.ndarray],
    ) -> Segment:
        """Count the steps and make a segment of them."""
        self.count(rewards)
        taken, expected = np.array(actions), self._spec.action
        if taken.dtype.kind not in ("iubf" if expected.numpy_dtype().kind == "f" else "iub"):
            raise InvalidSegment(DropReason.INVALID_DTYPE, "action", f"{taken.dtype}, expected {expected.dtype}")
        if taken.shape[1:] != expected.shape:
            raise InvalidSegment(DropReason.INVALID_SHAPE, "action", f"{taken.shape[1:]}, expected {expected.shape}")
        has_ended = terminated or truncated
        return Segment(
            observations,
            taken.astype(expected.numpy_dtype()),
            np.array(rewards, np.float32),
            np.array(log_probabilities, np.float32),
            np.array(versions, np.int64),
            bool(terminated),
            bool(truncated and not terminated),
            self._return if has_ended else None,
            self._length if has_ended else None,
            extras,
        )

    @property
    def is_empty(self) -> bool:
        """Whether the next step begins a segment."""
        return not self._steps

    def discard_steps(self) -> None:
        """Forget the steps of an incomplete segment; the next one begins at the present observation. They stay in the
        episode's return and length."""
        num_steps = len(self._steps)
        self._observations.take(0, next_first=num_steps)
        for each, buffer in self._extras:
            buffer.take(0, next_first=num_steps if each.per == "observation" else 1)
        self.count([reward for _, reward, _, _ in self._steps])
        self._steps = []

    def _store_extras(self, index: int, extras: Mapping[str, Any]) -> None:
        if len(extras) != len(self._extras) or any(each.name not in extras for each, _ in self._extras):
            problem = f"{sorted(extras)}, expected {[each.name for each, _ in self._extras]}"
            raise InvalidSegment(DropReason.INVALID_FRAMES, "extras", problem)
        for each, buffer in self._extras:
            # Of a segment's extra, the first row is of this segment, the other of the one after it.
            buffer.store(min(index, 1) if each.per == "segment" else index, extras[each.name])
