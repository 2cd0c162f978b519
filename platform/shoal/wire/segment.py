"""A segment of experience: consecutive steps of one episode, each with its weights version and log-probability; packing
and unpacking for the wire.

`unpack_segment` is the trust boundary: its result fits the spec in dtype, shape, range and finiteness. Inside, segments
are trusted. Legend of shape suffixes: L steps (1 ≤ L ≤ segment_length).
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from shoal.errors import InvalidSegment
from shoal.wire.action_masks import MASKS, check_masks
from shoal.wire.experience_spec import DTYPES, ExperienceSpec, TensorSpec
from shoal.wire.messages import EpisodeSummary, SegmentMessage, TensorHeader, encode

_NAMES = {np.dtype(code): name for name, code in DTYPES.items()}
TENSORS = ("observations", "actions", "rewards", "log_probabilities", "versions")  # of each segment
_HEADER_BYTES = 1024  # more than the header of five tensors ever needs
_EXTRA_HEADER_BYTES = 256  # and of each further one
_UNRECORDED_BYTES = 80  # of an episode without a segment of its end
MAX_UNRECORDED = 100  # of a segment
_LOG_PROBABILITY = TensorSpec("float32", (), None, 1e-3)  # log p ≤ 0, with a margin for rounding
_LOG_DENSITY = TensorSpec("float32", ())  # of an action that is not one of finitely many
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
LARGEST_REWARD = 1e12  # returns, their squares and those of their gradients stay finite in float32
_MIN_REDUCED = 16  # numbers, from which on reductions of NumPy are faster than those of a list
REWARD = TensorSpec("float32", (), -LARGEST_REWARD, LARGEST_REWARD)
_VERSION = TensorSpec("int64", (), 1, None)
HUMAN = "human"  # the behaviour of who takes the controls of the policy
_BEHAVIOUR = re.compile(r"[A-Za-z0-9_-]{1,32}")


class DropReason(enum.StrEnum):
    """Why a received segment did not, or will not, enter training."""

    INVALID_FRAMES = "invalid_frames"  # the frames do not match their own header
    INVALID_DTYPE = "invalid_dtype"
    INVALID_SHAPE = "invalid_shape"
    INVALID_RANGE = "invalid_range"
    NON_FINITE = "non_finite"
    OVER_CREDIT = "over_credit"  # sent beyond the send limit, or when the queue was full
    STALE_ADMISSION = "stale_admission"  # older than max_version_lag when it arrived
    STALE_CONSUMPTION = "stale_consumption"  # older than max_version_lag when the learner took it
    EXPIRED = "expired"  # of an episode at the gateway that its client has not continued, or its user not rewarded
    GATEWAY_CRASH = "gateway_crash"  # queued in a gateway that died
    GATEWAY_LOST = "gateway_lost"  # acknowledged by a gateway that was lost with its ledger; perhaps learnt before
    LEARNER_CRASH = "learner_crash"  # leased to a learner that died before it acknowledged
    LEASE_LOST = "lease_lost"  # leased in an answer that never reached the learner
    QUARANTINED = "quarantined"  # of an actor whose log-probabilities are impossible
    SHUTDOWN = "shutdown"  # still queued when the run ended
    DEMONSTRATION = "demonstration"  # accepted, and kept beside the experience: not by the run's policy
    NOT_STORED = "not_stored"  # a demonstration that the gateway cannot keep


@dataclass(eq=False, slots=True)  # frozen, it would take four times as long to make
class Segment:
    """L consecutive steps of one episode; never changed.

    observations: [L+1, *obs]; the last one is the environment's real observation after the last step, also when the
                  episode ended there, so that a truncated episode is bootstrapped from its real final observation
    actions [L, *act], rewards float32 [L], log_probabilities float32 [L] of the behaviour policy
    versions int64 [L]: the weights version that chose each action
    terminated, truncated: how the episode ended after the last step; at most one is true
    episode_return, episode_length: of the whole episode, given when it ended here
    opponent: with self-play, the version that the other agents had; 0 without
    unrecorded: episodes of the same policy's agents that ended before, and of whose end there is no segment
    success: whether the episode reached its goal; None: it did not end here, or its environment does not say
    settings: the version of the game's settings in this episode; 0: the newest that its actor was sent
    extras: further tensors by name: [1, ...] of the segment's first observation, or [L+1, ...] of each
    behaviour: who acted, as "human"; "": the policy. Otherwise log_probabilities and versions are 0
    assisted: others than the policy took some steps of the episode: its return is not the policy's
    episode: its number, where the gateway has assembled the segment; None: the actor has, and sends no number
    """

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    log_probabilities: np.ndarray
    versions: np.ndarray
    terminated: bool = False
    truncated: bool = False
    episode_return: float | None = None
    episode_length: int | None = None
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    opponent: int = 0
    unrecorded: tuple[EpisodeSummary, ...] = ()
    success: bool | None = None
    settings: int = 0
    behaviour: str = ""
    assisted: bool = False
    episode: int | None = None

    @property
    def num_steps(self) -> int:
        return len(self.rewards)

    @property
    def oldest_version(self) -> int:
        return int(self.versions.min())


def largest_segment_bytes(spec: ExperienceSpec) -> int:
    """The size of a message with the longest segment that fits the spec, header included."""
    length = spec.segment_length
    extras = sum(_EXTRA_HEADER_BYTES + each.count_rows(length) * _row_bytes(each.tensor) for each in spec.extras)
    steps = (length + 1) * _row_bytes(spec.observation) + length * (_row_bytes(spec.action) + 4 + 4 + 8)
    # Where another policy has credit, agents without it play on.
    unrecorded = _UNRECORDED_BYTES * MAX_UNRECORDED if spec.agents else 0
    return _HEADER_BYTES + steps + extras + unrecorded


def _row_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.numpy_dtype().itemsize


def estimate_segment_bytes(segment: Segment) -> int:
    """The size of its message, header included."""
    extras = sum(_EXTRA_HEADER_BYTES + int(array.nbytes) for array in segment.extras.values())
    tensors = sum(int(getattr(segment, name).nbytes) for name in TENSORS)
    return _HEADER_BYTES + tensors + extras + _UNRECORDED_BYTES * len(segment.unrecorded)


class PackedSegment(NamedTuple):
    """A segment ready to send, but for its number. Later changes of the original arrays do not affect it."""

    header: SegmentMessage
    tensors: list[bytes]

    @classmethod
    def from_segment(cls, segment: Segment) -> PackedSegment:
        """Raises InvalidSegment when an array has an unsupported dtype."""
        headers, tensors = [], []
        named = [(name, getattr(segment, name)) for name in (TENSORS[:3] if segment.behaviour else TENSORS)]
        for name, array in (*named, *segment.extras.items()):
            array = np.ascontiguousarray(array)
            dtype = _NAMES.get(array.dtype) or _NAMES.get(array.dtype.newbyteorder("<"))
            if dtype is None:
                problem = f"{array.dtype} cannot travel, these can: {', '.join(DTYPES)}"
                raise InvalidSegment(DropReason.INVALID_DTYPE, name, problem)
            headers.append(TensorHeader(name, dtype, array.shape))
            tensors.append(array.astype(DTYPES[dtype], copy=False).tobytes())
        header = SegmentMessage(
            0,
            tuple(headers),
            bool(segment.terminated),  # msgpack cannot encode NumPy's scalar
            bool(segment.truncated),
            None if segment.episode_return is None else float(segment.episode_return),
            None if segment.episode_length is None else int(segment.episode_length),
            segment.opponent or msgspec.UNSET,
            segment.unrecorded or msgspec.UNSET,
            msgspec.UNSET if segment.success is None else bool(segment.success),
            segment.settings or msgspec.UNSET,
            segment.behaviour or msgspec.UNSET,
            segment.assisted or msgspec.UNSET,
        )
        return cls(header, tensors)

    def to_frames(self, seq: int) -> list[bytes]:
        """The message's frames: the header, then one per tensor."""
        return [encode(msgspec.structs.replace(self.header, seq=seq)), *self.tensors]


def pack_segment(segment: Segment, seq: int) -> list[bytes]:
    """The frames of a segment message. Raises InvalidSegment when an array has an unsupported dtype."""
    return PackedSegment.from_segment(segment).to_frames(seq)


def is_behaviour(name: str) -> bool:
    """Whether it can be the name of a behaviour: 1 to 32 letters, digits, `-` and `_`."""
    return _BEHAVIOUR.fullmatch(name) is not None


def unpack_segment(
    message: SegmentMessage, frames: Sequence[bytes], spec: ExperienceSpec, behaviour: str = ""
) -> Segment:
    """The segment in `frames` (without the header frame), validated against `spec`; the arrays are views of the frames.

    behaviour: of the actor, where the message names none; of another than the policy's, log-probabilities and versions
    are not read. Tensors of unknown names are ignored, as a newer client may send more. Raises InvalidSegment with the
    DropReason as its `reason`.
    """
    if len(message.tensors) != len(frames):
        problem = f"{len(message.tensors)} described, but {len(frames)} frames follow"
        raise InvalidSegment(DropReason.INVALID_FRAMES, "tensors", problem)
    described = {header.name: (header, frame) for header, frame in zip(message.tensors, frames, strict=True)}
    if len(described) != len(frames):
        raise InvalidSegment(DropReason.INVALID_FRAMES, "tensors", "one name stands there twice")
    if "rewards" not in described:
        raise InvalidSegment(DropReason.INVALID_FRAMES, "rewards", "is missing")
    shape = described["rewards"][0].shape
    if len(shape) != 1 or not 1 <= shape[0] <= spec.segment_length:
        problem = f"{list(shape)[:9]}, expected [L] with 1 ≤ L ≤ {spec.segment_length}"
        raise InvalidSegment(DropReason.INVALID_SHAPE, "rewards", problem)
    (length,) = shape
    unrecorded = message.unrecorded or ()
    _check_episodes(message, length, unrecorded)
    behaviour = behaviour if message.behaviour is msgspec.UNSET else message.behaviour
    if behaviour and not is_behaviour(behaviour):
        problem = f"{behaviour[:40]!r}, expected 1 to 32 letters, digits, - and _"
        raise InvalidSegment(DropReason.INVALID_RANGE, "behaviour", problem)
    log_probability = _LOG_PROBABILITY if spec.action.numpy_dtype().kind != "f" else _LOG_DENSITY
    extras = {
        each.name: _read_tensor(each.name, described, each.count_rows(length), each.tensor) for each in spec.extras
    }
    actions = check_bounds(_read_tensor("actions", described, length, spec.action), spec)
    if MASKS in extras:
        check_masks(actions, extras[MASKS], message.terminated, spec)
    return Segment(
        _read_tensor("observations", described, length + 1, spec.observation),
        actions,
        _read_tensor("rewards", described, length, REWARD),
        np.zeros(length, np.float32)
        if behaviour
        else _read_tensor("log_probabilities", described, length, log_probability),
        np.zeros(length, np.int64) if behaviour else _read_tensor("versions", described, length, _VERSION),
        message.terminated,
        message.truncated,
        message.episode_return,
        message.episode_length,
        extras,
        message.opponent or 0,
        unrecorded,
        None if message.success is msgspec.UNSET else message.success,
        message.settings or 0,
        behaviour,
        message.assisted is True,
    )


def _read_tensor(
    name: str, described: Mapping[str, tuple[TensorHeader, bytes]], num_rows: int, spec: TensorSpec
) -> np.ndarray:
    """One tensor, checked in order: present, dtype, shape, size of the frame, finite, range."""
    if name not in described:
        raise InvalidSegment(DropReason.INVALID_FRAMES, name, "is missing")
    header, frame = described[name]
    if header.dtype != spec.dtype:
        raise InvalidSegment(DropReason.INVALID_DTYPE, name, f"{header.dtype[:20]}, expected {spec.dtype}")
    expected = (num_rows, *spec.shape)
    if header.shape != expected:
        raise InvalidSegment(DropReason.INVALID_SHAPE, name, f"{list(header.shape)[:9]}, expected {list(expected)}")
    dtype = spec.numpy_dtype()
    if len(frame) != math.prod(expected) * dtype.itemsize:
        problem = f"{header.dtype} {list(expected)} does not fit a frame of {len(frame)} bytes"
        raise InvalidSegment(DropReason.INVALID_FRAMES, name, problem)
    array: np.ndarray = np.frombuffer(frame, dtype).reshape(expected)
    check_values(name, array, spec)
    return array


def check_values(name: str, array: np.ndarray, spec: TensorSpec) -> None:
    """Raise InvalidSegment for a number that is not finite in float32, in which the learner computes, or lies outside
    of the spec's range, and for a bool other than 0 and 1."""
    if not array.size:
        return
    if array.dtype.kind == "b" and array.view(np.uint8).max() > 1:
        raise InvalidSegment(DropReason.INVALID_RANGE, name, "has a bool that is neither 0 nor 1")
    if array.size < _MIN_REDUCED:
        values = array.ravel().tolist()
        low, high = (min(values), max(values)) if (total := sum(values)) == total else (math.nan, math.nan)
    else:
        low, high = array.min(), array.max()  # two extremes cost no array, as isfinite does; NaN reaches both
    if array.dtype.kind == "f":
        check_finite(name, float(low), float(high))
    if spec.low is not None and low < spec.low:
        raise InvalidSegment(DropReason.INVALID_RANGE, name, f"{low} is below {spec.low}")
    if spec.high is not None and high > spec.high:
        raise InvalidSegment(DropReason.INVALID_RANGE, name, f"{high} is above {spec.high}")


def check_finite(name: str, low: float, high: float) -> None:
    """Raise InvalidSegment where one of the two extremes is not finite in float32."""
    if not (low >= -LARGEST_FLOAT32 and high <= LARGEST_FLOAT32):
        value = low if low < -LARGEST_FLOAT32 else high
        raise InvalidSegment(DropReason.NON_FINITE, name, f"{value:g} is not finite in float32")


def check_bounds(actions: np.ndarray, spec: ExperienceSpec) -> np.ndarray:
    """`actions` [L, *act], each number of which lies within its own bounds. Raises InvalidSegment."""
    low, high = np.array(spec.policy.action_low), np.array(spec.policy.action_high)
    if spec.policy.action_sizes:
        low, high = np.zeros(len(spec.policy.action_sizes)), np.array(spec.policy.action_sizes) - 1
    if low.size:
        rows = actions.reshape(len(actions), -1)
        outside = (rows < low) | (rows > high)
        if outside.any():
            step, index = np.argwhere(outside)[0]
            bounds = f"[{low[index]:g}, {high[index]:g}]"
            problem = f"number {index} of step {step} is {rows[step, index]:g}, expected within {bounds}"
            raise InvalidSegment(DropReason.INVALID_RANGE, "actions", problem)
    return actions


def _check_episodes(message: SegmentMessage, length: int, unrecorded: Sequence[EpisodeSummary]) -> None:
    """What a message says of the ends of episodes. Raises InvalidSegment."""
    if message.terminated and message.truncated:
        raise InvalidSegment(DropReason.INVALID_RANGE, "truncated", "an episode is terminated or truncated, not both")
    if message.episode_return is not None and not math.isfinite(message.episode_return):
        raise InvalidSegment(DropReason.NON_FINITE, "episode_return", "is NaN or infinite")
    if message.episode_length is not None and message.episode_length < length:
        problem = f"{message.episode_length} is below the {length} steps of this segment"
        raise InvalidSegment(DropReason.INVALID_RANGE, "episode_length", problem)
    ended = message.terminated or message.truncated
    for name in ("episode_return", "episode_length"):
        if (getattr(message, name) is not None) != ended:
            problem = "is missing, though the episode ended" if ended else "is given, though the episode goes on"
            raise InvalidSegment(DropReason.INVALID_RANGE, name, problem)
    if len(unrecorded) > MAX_UNRECORDED:
        problem = f"has {len(unrecorded)} episodes, at most {MAX_UNRECORDED}"
        raise InvalidSegment(DropReason.INVALID_RANGE, "unrecorded", problem)
    for each in unrecorded:
        if not math.isfinite(each.episode_return):
            raise InvalidSegment(DropReason.NON_FINITE, "unrecorded", "has a return that is NaN or infinite")
        if each.episode_length < 1:
            problem = f"has an episode of {each.episode_length} steps"
            raise InvalidSegment(DropReason.INVALID_RANGE, "unrecorded", problem)
