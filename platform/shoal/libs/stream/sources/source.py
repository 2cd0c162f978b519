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

MAX_SHOWN_CHARS = MAX_NAME_CHARS = 200
MAX_NAME_LEVELS = 100  # mosquitto ends the connection of a client that publishes to a topic of more than 200
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
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NAME = msgspec.json.Decoder(str | int)


def encode_payload(values: tuple[float, ...], time_s: float) -> bytes:
    """The payload of a reading."""
    value = values[0] if len(values) == 1 else values
    return msgspec.json.encode({"value": value, "time": time_s})


def match_wildcards(topic_filter: str, topic: str) -> str:
    """What the wildcards of the filter match, joined by `/`; the topic's last level for a filter without any.

    `#` matches any number of levels, also none: then "". A topic that the filter does not match, which a session has
    from an earlier subscription, gives its last level too.
    """
    if topic_filter.startswith("$share/"):  # a subscription that several clients share: $share/GROUP/FILTER
        topic_filter = topic_filter.split("/", 2)[-1]
    wanted, levels = topic_filter.split("/"), topic.split("/")
    has_rest = wanted[-1] == "#"
    fixed = wanted[:-1] if has_rest else wanted
    is_match = len(levels) >= len(fixed) if has_rest else len(levels) == len(fixed)
    is_match = is_match and all(one in ("+", level) for one, level in zip(fixed, levels, strict=False))
    if not is_match or not (has_rest or "+" in fixed):
        return levels[-1]
    found = [level for one, level in zip(fixed, levels, strict=False) if one == "+"]
    return "/".join(found + levels[len(fixed) :])


class MessageParser:
    """Reads `{"value": 21.5, "time": 1764100000.25}`, or a list of `width` values; 0: any number of them.

    `time` may be missing if the message has a publisher and a sequence; the time of arrival stands for it.

    topic_filter: what its wildcards match names the sensor
    sensor_field: the field of the payload that names the sensor in place of the topic; "": none
    """

    def __init__(self, width: int, topic_filter: str = "", sensor_field: str = "") -> None:
        self._width, self._topic_filter, self._sensor_field = width, topic_filter, sensor_field

    def parse(
        self, topic: str, payload: bytes, publisher: str, sequence: int | None, received_s: float
    ) -> Message | MalformedPayload:
        """The message of a payload, or what is wrong with it."""
        try:
            reading = _DECODER.decode(payload)
            sensor = self._name_sensor(topic, payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _reject(topic, payload, str(error))
        values = reading.value if isinstance(reading.value, tuple) else (reading.value,)
        is_counted = publisher and sequence is not None and sequence >= 0
        problem = ""
        if sensor is None:
            named_by = f"field {self._sensor_field!r}" if self._sensor_field else "topic"
            size = f"at most {MAX_NAME_CHARS} printable characters without + and #, in {MAX_NAME_LEVELS} levels"
            problem = f"its {named_by} names no sensor: {size}"
        elif not are_usable(*values, reading.time or 0.0):
            problem = f"a number is not finite, or beyond {LARGEST_NUMBER:g}"
        elif len(values) != self._width and (self._width or not values):
            problem = f"has {len(values)} values, and the stream has {self._width or 'at least 1'}"
        elif reading.time is None and not is_counted:
            problem = "has neither a time nor a publisher with a sequence: it cannot be told apart"
        if sensor is None or problem:
            return _reject(topic, payload, problem)
        if not is_counted:
            digest = hashlib.blake2b(topic.encode() + b"\0" + payload, digest_size=8).digest()
            publisher, sequence = "", int.from_bytes(digest, "big")
        time_s = received_s if reading.time is None else reading.time
        assert sequence is not None
        return Message(sensor, values, time_s, publisher, sequence)

    def _name_sensor(self, topic: str, payload: bytes) -> str | None:
        """None where the field is missing or empty, or is no name that a forecast's topic can have: the broker would
        end the connection, and deliver the message again. Raises DecodeError."""
        if not self._sensor_field:
            name = match_wildcards(self._topic_filter, topic)
            is_name = True  # the broker has checked its characters
        else:
            fields = _FIELDS.decode(payload)
            name = str(_NAME.decode(fields[self._sensor_field])) if self._sensor_field in fields else ""
            is_name = bool(name) and name.isprintable() and not set("+#") & set(name)
        is_short = len(name) <= MAX_NAME_CHARS and name.count("/") < MAX_NAME_LEVELS
        return name if is_name and is_short else None


def are_usable(*numbers: float) -> bool:
    """Whether all are finite and can be squared."""
    return all(math.isfinite(number) and abs(number) <= LARGEST_NUMBER for number in numbers)


def _reject(topic: str, payload: bytes, problem: str) -> MalformedPayload:
    return MalformedPayload(topic, problem, payload[:MAX_SHOWN_CHARS].decode(errors="backslashreplace"))
