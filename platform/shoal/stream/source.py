"""Messages of sensors, and the seam behind which they come from: a broker, files, a test.

Implementations: `MqttSource` (a live topic), `ReplaySource` (files), and the film site's `RatingSource` (a log in a
database). All yield the same `Message` objects, so that a trainer cannot tell them apart. Called by `StreamLoop` and by
the site's retraining; knows neither torch nor a broker.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

MAX_SHOWN_CHARS = 200
LARGEST_NUMBER = 1e100  # squares of larger ones overflow, and with them a sensor's scaler


class Message(msgspec.Struct, frozen=True, array_like=True):
    """One reading of one sensor.

    sensor:    whose reading it is
    values:    the reading; a forecast is of the first value
    time_s:    when it was read, by the publisher's clock: seconds since the epoch
    publisher: who sent it, and `sequence` the publisher's own count of its messages: together they identify it. ""
               where the publisher does not count: then `sequence` is a hash of topic and payload
    """

    sensor: str
    values: tuple[float, ...]
    time_s: float
    publisher: str
    sequence: int


class MalformedPayload(msgspec.Struct, frozen=True):
    """A message that is no reading. It is counted, acknowledged and never learnt.

    origin: its topic, or file and row
    text:   the beginning of its payload
    """

    origin: str
    problem: str
    text: str


@dataclass(frozen=True)
class Delivery:
    """The messages of one poll, in the order of their delivery.

    num_redelivered: how many the broker marked as sent before
    received_s:      when the last one arrived, by this process's clock: seconds since the epoch
    """

    messages: list[Message] = field(default_factory=list)
    malformed: list[MalformedPayload] = field(default_factory=list)
    num_redelivered: int = 0
    received_s: float = 0.0


@dataclass(frozen=True)
class StreamState:
    """How far a stream is learnt, as of a durable checkpoint.

    num_delivered: deliveries of this process's source that the checkpoint accounts for, malformed ones included
    sequences:     the highest sequence learnt of each publisher
    """

    num_delivered: int = 0
    sequences: Mapping[str, int] = field(default_factory=dict)


class StreamSource(Protocol):
    """Where messages come from.

    A source hands out each message at least once, and again after a restart unless it was committed.
    """

    @property
    def num_delivered(self) -> int:
        """How many messages `poll` has returned so far, malformed ones included."""
        ...

    @property
    def is_exhausted(self) -> bool:
        """Whether no message will ever follow; never true of a live source."""
        ...

    def example(self) -> Message:
        """A message of the stream, which is not consumed. Raises DataError when none comes."""
        ...

    def open(self, state: StreamState) -> None:
        """Begin to deliver what follows `state`; may deliver earlier messages again."""
        ...

    def poll(self, max_messages: int, timeout_s: float) -> Delivery:
        """The messages that are there, at most `max_messages`; waits up to `timeout_s` for the first one."""
        ...

    def commit(self, state: StreamState) -> None:
        """Acknowledge what `state` covers. Called after the checkpoint that contains it is on the disk."""
        ...

    def close(self) -> None:
        """Stop delivering. What was not committed will be delivered to the next one. Idempotent."""
        ...


class _Reading(msgspec.Struct):
    """The JSON of a payload."""

    value: float | tuple[float, ...]
    time: float | None = None


_DECODER = msgspec.json.Decoder(_Reading)


def encode_payload(values: tuple[float, ...], time_s: float) -> bytes:
    """The payload of a reading."""
    value = values[0] if len(values) == 1 else values
    return msgspec.json.encode({"value": value, "time": time_s})


def parse_message(
    topic: str, payload: bytes, publisher: str, sequence: int | None, received_s: float, width: int
) -> Message | MalformedPayload:
    """Read `{"value": 21.5, "time": 1764100000.25}`, or a list of `width` values; 0: any number of them.

    `time` may be missing if the message has a publisher and a sequence; the time of arrival stands for it.
    """
    try:
        reading = _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _reject(topic, payload, str(error))
    values = reading.value if isinstance(reading.value, tuple) else (reading.value,)
    if not are_usable(*values, reading.time or 0.0):
        return _reject(topic, payload, f"a number is not finite, or beyond {LARGEST_NUMBER:g}")
    if len(values) != width and (width or not values):
        return _reject(topic, payload, f"has {len(values)} values, and the stream has {width or 'at least 1'}")
    is_counted = publisher and sequence is not None and sequence >= 0
    if reading.time is None and not is_counted:
        return _reject(topic, payload, "has neither a time nor a publisher with a sequence: it cannot be told apart")
    if not is_counted:
        digest = hashlib.blake2b(topic.encode() + b"\0" + payload, digest_size=8).digest()
        publisher, sequence = "", int.from_bytes(digest, "big")
    time_s = received_s if reading.time is None else reading.time
    assert sequence is not None
    return Message(topic.rpartition("/")[2], values, time_s, publisher, sequence)


def are_usable(*numbers: float) -> bool:
    """Whether all are finite and can be squared."""
    return all(math.isfinite(number) and abs(number) <= LARGEST_NUMBER for number in numbers)


def _reject(topic: str, payload: bytes, problem: str) -> MalformedPayload:
    return MalformedPayload(topic, problem, payload[:MAX_SHOWN_CHARS].decode(errors="backslashreplace"))
