"""The messages, and their encoding: a msgpack header in the first frame, raw little-endian tensors in the others.

Used by the gateway and by the actor client. Knows nothing of sockets, and never unpickles: a frame is read as a msgpack
map of known types or as bytes, and anything else is a ProtocolViolation with an error code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from shoal.errors import ProtocolViolation
from shoal.wire.experience_spec import ExperienceSpec

PROTOCOL_VERSION = 1


@dataclass(frozen=True)
class MessageLimits:
    """Hard limits of one message. The gateway sends its own in `welcome`."""

    max_header_bytes: int = 64 * 1024
    max_message_bytes: int = 64 * 1024 * 1024
    max_frames: int = 32


class TensorHeader(msgspec.Struct, frozen=True):
    """Describes the tensor in one frame: C order, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Hello(msgspec.Struct, frozen=True, tag_field="kind", tag="hello"):
    """actor → gateway, first on every connection. `incarnation` grows with every start of the same actor id."""

    protocol: int
    token: str
    actor_id: str
    incarnation: int
    client: str = ""


class Welcome(msgspec.Struct, frozen=True, tag_field="kind", tag="welcome"):
    """gateway → actor. `next_seq` is the first sequence number that the gateway still needs; segments with
    `seq < send_limit` may be sent."""

    protocol: int
    run_id: str
    spec: ExperienceSpec
    next_seq: int
    send_limit: int
    weights_version: int
    heartbeat_s: float
    timeout_s: float
    max_message_bytes: int


class SegmentMessage(msgspec.Struct, frozen=True, tag_field="kind", tag="segment"):
    """actor → gateway. Consecutive steps of one episode; `tensors` describes the frames that follow."""

    seq: int
    tensors: tuple[TensorHeader, ...]
    terminated: bool = False
    truncated: bool = False
    episode_return: float | None = None
    episode_length: int | None = None


class Ack(msgspec.Struct, frozen=True, tag_field="kind", tag="ack"):
    """gateway → actor, once for every segment. status: "accepted", "dropped" (with reason) or "duplicate"."""

    seq: int
    status: str
    send_limit: int
    weights_version: int
    reason: str = ""
    detail: str = ""


class Credit(msgspec.Struct, frozen=True, tag_field="kind", tag="credit"):
    """gateway → actor, when slots became free: segments with `seq < send_limit` may be sent."""

    send_limit: int


class Pull(msgspec.Struct, frozen=True, tag_field="kind", tag="pull"):
    """actor → gateway. Answered by `weights` as soon as a version above `newer_than` exists; one is open at a time."""

    newer_than: int


class WeightsMessage(msgspec.Struct, frozen=True, tag_field="kind", tag="weights"):
    """gateway → actor. One frame follows: safetensors, whose SHA-256 is given in hex."""

    version: int
    sha256: str


class Ping(msgspec.Struct, frozen=True, tag_field="kind", tag="ping"):
    """Either way; answered by `pong` with the same `nonce`."""

    nonce: int = 0


class Pong(msgspec.Struct, frozen=True, tag_field="kind", tag="pong"):
    """The answer to `ping`."""

    nonce: int = 0


class Bye(msgspec.Struct, frozen=True, tag_field="kind", tag="bye"):
    """Either way, last. From the gateway: `finished` means that the run is over, so reconnecting is useless."""

    reason: str = ""
    finished: bool = False


class ErrorMessage(msgspec.Struct, frozen=True, tag_field="kind", tag="error"):
    """gateway → actor. `fatal` means: do not retry unchanged."""

    code: str
    message: str
    fatal: bool = False


Message = Hello | Welcome | SegmentMessage | Ack | Credit | Pull | WeightsMessage | Ping | Pong | Bye | ErrorMessage

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)


class _KindHeader(msgspec.Struct):
    kind: str


_KIND_DECODER = msgspec.msgpack.Decoder(_KindHeader)
_KINDS = frozenset({"hello", "welcome", "segment", "ack", "credit", "pull", "weights", "ping", "pong", "bye", "error"})


def encode(message: Message) -> bytes:
    """The header frame of a message."""
    return _ENCODER.encode(message)


def decode(frames: Sequence[bytes], limits: MessageLimits) -> Message:
    """The message with header `frames[0]`. The other frames are only counted and measured.

    Raises ProtocolViolation with code `too_large`, `unknown_kind` or `malformed`.
    """
    if not frames:
        raise ProtocolViolation("malformed", "a message has at least one frame")
    if len(frames) > limits.max_frames:
        raise ProtocolViolation("too_large", f"{len(frames)} frames, at most {limits.max_frames}")
    if len(frames[0]) > limits.max_header_bytes:
        raise ProtocolViolation("too_large", f"a header of {len(frames[0])} bytes, at most {limits.max_header_bytes}")
    size_bytes = sum(map(len, frames))
    if size_bytes > limits.max_message_bytes:
        raise ProtocolViolation("too_large", f"a message of {size_bytes} bytes, at most {limits.max_message_bytes}")
    try:
        message: Message = _DECODER.decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _make_violation(frames[0], error) from None
    return message


def _make_violation(header: bytes, error: Exception) -> ProtocolViolation:
    """Distinguish an unknown kind, which a newer peer may send in good faith, from an invalid header."""
    try:
        kind = _KIND_DECODER.decode(header).kind
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ProtocolViolation("malformed", f"the header is not a msgpack map with a `kind`: {error}")
    if kind not in _KINDS:
        return ProtocolViolation("unknown_kind", f"no message of kind {kind[:40]!r}")
    return ProtocolViolation("malformed", f"{kind}: {error}")
