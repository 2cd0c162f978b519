"""The messages, and their encoding: a msgpack header in the first frame, raw little-endian tensors in the others.

Used by the gateway and by the actor client. Knows nothing of sockets, and never unpickles: a frame is read as a msgpack
map of known types or as bytes, and anything else is a ProtocolViolation with an error code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from shoal.errors import ProtocolViolation
from shoal.wire.experience_spec import ExperienceSpec

PROTOCOL_VERSION = 1
MAX_ROWS = 4096  # of an `acts`
# bits of its flags
ROW_TERMINATED = 1
ROW_TRUNCATED = 2
ROW_TELLS_SUCCESS = 4
ROW_SUCCESS = 8


GameSettings = Mapping[str, bool | int | float | str]


@dataclass(frozen=True)
class MessageLimits:
    """Hard limits of one message. The gateway sends its own in `welcome`."""

    max_header_bytes: int = 64 * 1024
    max_message_bytes: int = 64 * 1024 * 1024
    max_frames: int = 32


class TaggedStruct(msgspec.Struct, frozen=True, tag_field="kind"):
    """Any message: its field `kind` has the tag of its type."""


class TensorHeader(msgspec.Struct, frozen=True):
    """Describes the tensor in one frame: C order, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Hello(TaggedStruct, frozen=True, tag="hello", omit_defaults=True):
    """actor → gateway, first on every connection. `incarnation` grows with every start of the same actor id.
    `inference`: "local", or "remote" for a session of `act` and `action`. `acknowledged`: how many segments gateways
    of the run `run_id` have acknowledged to this incarnation. `offers`: the spaces of the game, see `given_spaces`.
    `behaviour`: who acts, as "human"; "" is the policy."""

    protocol: int
    token: str
    actor_id: str
    incarnation: int
    client: str = ""
    inference: str = "local"
    run_id: str = ""
    acknowledged: int = 0
    offers: dict[str, Any] = {}
    behaviour: str = ""


class Welcome(TaggedStruct, frozen=True, tag="welcome", omit_defaults=True):
    """gateway → actor. `next_seq` is the first sequence number that the gateway still needs; segments with
    `seq < send_limit` may be sent. `synchronous`: the actor pauses without credit, and sends no step of older weights.
    `settings`: what the run tells the game, as of `settings_version`.
    """

    protocol: int
    run_id: str
    spec: ExperienceSpec
    next_seq: int
    send_limit: int
    weights_version: int
    heartbeat_s: float
    timeout_s: float
    max_message_bytes: int
    synchronous: bool = False
    inference: str = "local"
    settings: GameSettings | msgspec.UnsetType = msgspec.UNSET
    settings_version: int = 0


class SettingsMessage(TaggedStruct, frozen=True, tag="settings"):
    """gateway → actor, when the settings have changed: all of them, and their version."""

    version: int
    values: GameSettings


class EpisodeSummary(msgspec.Struct, frozen=True, omit_defaults=True):
    """An episode whose end no segment has. `opponent`: with self-play, the version that the other agents had.
    `success`: whether it reached its goal, where the environment says so."""

    episode_return: float
    episode_length: int
    opponent: int = 0
    success: bool | None = None


class SegmentMessage(TaggedStruct, frozen=True, tag="segment"):
    """actor → gateway. Consecutive steps of one episode; `tensors` describes the frames that follow. `opponent`: with
    self-play, the version that the other agents had. `unrecorded`: episodes that ended before, without credit.
    `success`: whether the episode that ended here reached its goal, where the environment says so. `settings`: the
    version of the settings that the episode is played with; else the newest that the actor was sent. `behaviour`: who
    took these steps, where that is not whom the hello names; `assisted`: others than the policy have acted in it."""

    seq: int
    tensors: tuple[TensorHeader, ...]
    terminated: bool = False
    truncated: bool = False
    episode_return: float | None = None
    episode_length: int | None = None
    opponent: int | msgspec.UnsetType = msgspec.UNSET
    unrecorded: tuple[EpisodeSummary, ...] | msgspec.UnsetType = msgspec.UNSET
    success: bool | msgspec.UnsetType = msgspec.UNSET
    settings: int | msgspec.UnsetType = msgspec.UNSET
    behaviour: str | msgspec.UnsetType = msgspec.UNSET
    assisted: bool | msgspec.UnsetType = msgspec.UNSET


class Ack(TaggedStruct, frozen=True, tag="ack"):
    """gateway → actor, once for every segment. status: "accepted", "dropped" (with reason) or "duplicate"."""

    seq: int
    status: str
    send_limit: int
    weights_version: int
    reason: str = ""
    detail: str = ""


class Credit(TaggedStruct, frozen=True, tag="credit"):
    """gateway → actor, when slots became free: segments with `seq < send_limit` may be sent."""

    send_limit: int


class Pull(TaggedStruct, frozen=True, tag="pull", omit_defaults=True):
    """actor → gateway. Answered by `weights` as soon as a version above `newer_than` exists; one is open at a time.
    `memory`: the actor is on the gateway's machine, and can map its memory."""

    newer_than: int
    memory: bool = False


class WeightsMessage(TaggedStruct, frozen=True, tag="weights", omit_defaults=True):
    """gateway → actor. One frame follows: safetensors, whose SHA-256 is given in hex. With a `size` none follows: the
    bytes are in memory, in the file `fd` of the process `pid`, which has this `inode`."""

    version: int
    sha256: str
    pid: int = 0
    fd: int = 0
    inode: int = 0
    size: int = 0


class PullOpponent(TaggedStruct, frozen=True, tag="pull_opponent"):
    """actor → gateway, in a run with self-play. Answered by `opponent` with the oldest version of the pool above
    `newer_than`, as soon as there is one; one is open at a time."""

    newer_than: int


class OpponentMessage(TaggedStruct, frozen=True, tag="opponent"):
    """gateway → actor. A version of the pool; one frame follows, as of `weights`. `members`: all versions of the pool
    now; the actor may forget others. Empty: unknown."""

    version: int
    sha256: str
    members: tuple[int, ...] = ()


class Ping(TaggedStruct, frozen=True, tag="ping"):
    """Either way; answered by `pong` with the same `nonce`."""

    nonce: int = 0


class Pong(TaggedStruct, frozen=True, tag="pong"):
    """The answer to `ping`."""

    nonce: int = 0


class Bye(TaggedStruct, frozen=True, tag="bye"):
    """Either way, last. From the gateway: `finished` means that the run is over, so reconnecting is useless."""

    reason: str = ""
    finished: bool = False


class ErrorMessage(TaggedStruct, frozen=True, tag="error"):
    """gateway → actor. `fatal` means: do not retry unchanged. `seq` is the segment that it is about, if any."""

    code: str
    message: str
    fatal: bool = False
    seq: int | None = None


class ActMessage(TaggedStruct, frozen=True, tag="act"):
    """actor → gateway; one frame follows: the observation before step `step` of `episode`. `reward` is that of the step
    before; at step 0, the return until then. `terminated` or `truncated`: the episode ended after the step before, and
    the observation is its last; `success` and, at step 0, `settings` as of a segment. `taken`: the action of the step
    before, where it is not the answer; at step 0, anything: others than the policy have acted until then."""

    episode: int
    step: int
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool | msgspec.UnsetType = msgspec.UNSET
    settings: int | msgspec.UnsetType = msgspec.UNSET
    taken: int | float | list[int | float] | msgspec.UnsetType = msgspec.UNSET


class ActionMessage(TaggedStruct, frozen=True, tag="action"):
    """gateway → actor, once for every `act`. `action`: a number, or an array's in C order; None after the last
    observation, and when `reason` says why the step was not taken; `detail` is that for people."""

    episode: int
    step: int
    action: int | list[int | float] | None = None
    version: int = 0
    reason: str = ""
    detail: str | msgspec.UnsetType = msgspec.UNSET


class ActsMessage(TaggedStruct, frozen=True, tag="acts"):
    """actor → gateway: an `act` for each of N episodes, in rows. Frames follow: observations [N, *obs], rewards float32
    [N], flags uint8 [N] (`ROW_TERMINATED`, ...), and in a run with masks: masks uint8 [N, K]. `settings`: as of `act`;
    0: the newest that were sent."""

    episodes: tuple[int, ...]
    steps: tuple[int, ...]
    settings: tuple[int, ...] = ()


class RefusedRow(msgspec.Struct, frozen=True):
    """A row of `acts` that was not taken. `reason` and `detail` as of `action`."""

    row: int
    episode: int
    step: int
    reason: str
    detail: str = ""


class ActionsMessage(TaggedStruct, frozen=True, tag="actions"):
    """gateway → actor, once for every `acts`. A frame follows: the actions [N, *act] of these episodes and steps.
    `version`: the newest one that chose any. `ended`: the episodes that end with rows of the `acts`."""

    episodes: tuple[int, ...]
    steps: tuple[int, ...]
    version: int = 0
    refused: tuple[RefusedRow, ...] = ()
    ended: tuple[int, ...] = ()


Message = (
    Hello
    | Welcome
    | SegmentMessage
    | Ack
    | Credit
    | Pull
    | WeightsMessage
    | PullOpponent
    | OpponentMessage
    | Ping
    | Pong
    | Bye
    | ErrorMessage
    | ActMessage
    | ActionMessage
    | SettingsMessage
    | ActsMessage
    | ActionsMessage
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)


class _LooseHeader(msgspec.Struct):
    """What can be read of a header that is wrong in another field, or of another kind. Raw: of any type"""

    kind: str
    protocol: msgspec.Raw = msgspec.Raw()
    seq: msgspec.Raw = msgspec.Raw()


_LOOSE_DECODER = msgspec.msgpack.Decoder(_LooseHeader)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_KINDS = {kind.__struct_config__.tag: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """The header frame of a message."""
    if isinstance(message, Welcome):
        # The size of a struct of 16 fields or more takes two bytes too many, if few are set.
        return _ENCODER.encode(msgspec.to_builtins(message, builtin_types=(bytes,)))
    return _ENCODER.encode(message)


def decode(frames: Sequence[bytes], limits: MessageLimits) -> Message:
    """The message with header `frames[0]`. The other frames are only counted and measured.

    Raises ProtocolViolation with code `too_large`, `unknown_kind`, `malformed`, or `bad_version` for a `hello` that
    names another protocol version and does not fit this one.
    """
    if not frames:
        raise ProtocolViolation("malformed", "a message has at least one frame")
    if len(frames[0]) > limits.max_header_bytes:
        raise ProtocolViolation("too_large", f"a header of {len(frames[0])} bytes, at most {limits.max_header_bytes}")
    if len(frames) > limits.max_frames:
        problem = f"{len(frames)} frames, at most {limits.max_frames}"
        raise ProtocolViolation("too_large", problem, _read_seq(frames[0]))
    size_bytes = sum(map(len, frames))
    if size_bytes > limits.max_message_bytes:
        problem = f"a message of {size_bytes} bytes, at most {limits.max_message_bytes}"
        raise ProtocolViolation("too_large", problem, _read_seq(frames[0]))
    try:
        message: Message = _DECODER.decode(frames[0])
    except _UNREADABLE as error:
        raise _make_violation(frames[0], error) from None
    return message


def to_message(header: Mapping[str, Any], frames: Sequence[bytes], limits: MessageLimits) -> Message | None:
    """The message of a header that was read from JSON, and of the frames after it; None for one that `decode` would not
    take as msgpack."""
    try:
        message: Message = msgspec.convert(header, _KINDS[header["kind"]])
        sizes = [len(encode(message)), *map(len, frames)]
    except (*_UNREADABLE, KeyError, TypeError, OverflowError):  # of integers of more than 64 bits
        return None
    fits = sizes[0] <= limits.max_header_bytes and len(sizes) <= limits.max_frames
    return message if fits and sum(sizes) <= limits.max_message_bytes else None


def reject_version(protocol: int) -> ProtocolViolation:
    """The answer to a `hello` of another protocol version."""
    return ProtocolViolation("bad_version", f"this gateway speaks protocol {PROTOCOL_VERSION}, not {protocol}")


def _read_seq(header: bytes) -> int | None:
    """The number of a segment whose header is wrong in another field."""
    try:
        loose = _LOOSE_DECODER.decode(header)
    except _UNREADABLE:
        return None
    return _read_int(loose.seq) if loose.kind == "segment" else None


def _read_int(value: msgspec.Raw) -> int | None:
    """None for what is no integer."""
    try:
        return msgspec.msgpack.decode(value, type=int)
    except _UNREADABLE:
        return None


def _make_violation(header: bytes, error: Exception) -> ProtocolViolation:
    """Distinguish an unknown kind, which a newer peer may send in good faith, from an invalid header."""
    try:
        loose = _LOOSE_DECODER.decode(header)
    except _UNREADABLE:
        return ProtocolViolation("malformed", f"the header is not a msgpack map with a `kind`: {error}")
    if loose.kind not in _KINDS:
        return ProtocolViolation("unknown_kind", f"no message of kind {loose.kind[:40]!r}")
    protocol = _read_int(loose.protocol) if loose.kind == "hello" else None
    if protocol is not None and protocol != PROTOCOL_VERSION:
        return reject_version(protocol)
    return ProtocolViolation("malformed", f"{loose.kind}: {error}", _read_seq(header))
