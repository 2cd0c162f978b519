"""Messages of sensors, as a topic or a file has them.

`SensorSource` of a live topic, `ReplaySource` of files, and the film site's `RatingSource` yield the same `Message`
objects, so that a trainer cannot tell them apart. Knows neither torch nor a broker.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import msgspec

from shoal.search.space import flatten
from shoal.sources import Delivery, MalformedPayload

MAX_SHOWN_CHARS = 200
MAX_NAME_CHARS = 200
MAX_NAME_LEVELS = 100  # mosquitto ends the connection of a client that publishes to a topic of more than 200
LARGEST_NUMBER = 1e100  # squares of larger ones overflow, and with them a sensor's scaler
VALUE, TIME = "value", "time"
FIRST_MS = 1e11  # a time from here on is in milliseconds: in seconds, it is the year 5138
SWITCHES = {"on": 1.0, "off": 0.0, "true": 1.0, "false": 0.0}


def reject_payload(topic: str, payload: bytes, problem: str, reason: str = "other") -> MalformedPayload:
    """What is wrong with a payload, and how it begins."""
    return MalformedPayload(topic, problem, payload[:MAX_SHOWN_CHARS].decode(errors="backslashreplace"), reason)


def hash_message(topic: str, payload: bytes) -> int:
    """64 bits, in place of a publisher's sequence."""
    return int.from_bytes(hashlib.blake2b(topic.encode() + b"\0" + payload, digest_size=8).digest(), "big")


class Payload(NamedTuple):
    """What a broker delivers, with what is known of it.

    publisher:  "" where it is not said
    sequence:   None where the publisher does not count
    packet_id:  the broker's, the same when it sends the message again, as `is_redelivered`; 0: it never does
    """

    topic: str
    content: bytes
    publisher: str
    sequence: int | None
    received_s: float
    packet_id: int = 0
    is_redelivered: bool = False


class Message(msgspec.Struct, frozen=True, array_like=True):
    """One reading of one sensor.

    sensor:    whose reading it is
    values:    the reading; a forecast is of the first value
    time_s:    when it was read, by the publisher's clock: seconds since the epoch
    publisher: who sent it, and `sequence` the publisher's own count of its messages: together they identify the
               payload, of which several sensors may have a reading each. "" where the publisher does not count: then
               `sequence` is a hash of topic and payload, and of the broker's number for it where it has no time
    is_first:  the broker has not sent it before, whatever was equal to it
    """

    sensor: str
    values: tuple[float, ...]
    time_s: float
    publisher: str
    sequence: int
    is_first: bool = False


class _Unusable(Exception):
    """Why a payload, or a field of it, is no reading.

    reason: a word, by which such messages are counted
    """

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason, self.problem = reason, problem


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
    matched = [level for one, level in zip(fixed, levels, strict=False) if one == "+"]
    return "/".join(matched + levels[len(fixed) :])


class MessageParser:
    """Reads `{"value": 21.5, "time": 1764100000.25}`, or the fields that sensors' software sends.

    width:        numbers of a reading, where a field has a list of them; 0: any number
    topic_filter: what its wildcards match names the sensor
    sensor_field: the field of the payload that names the sensor in place of the topic; "": none
    value_fields: what is read, nested fields by dots. With one name, the sensor has the topic's name; with several or a
                  pattern (`*`, `ENERGY.*`: every number), each field is a sensor `TOPIC/FIELD`
    time_field:   Unix seconds or milliseconds, or ISO 8601, of UTC where it has no zone. A message that lacks it has
                  the time of its arrival

    A payload that is a number alone, ON or OFF is the field `value`.
    """

    def __init__(
        self,
        width: int,
        topic_filter: str = "",
        sensor_field: str = "",
        value_fields: Sequence[str] = (VALUE,),
        time_field: str = TIME,
    ) -> None:
        self._width = width
        self._topic_filter = topic_filter
        self._sensor_field = sensor_field
        self._value_fields, self._time_field = tuple(value_fields), time_field
        self._names_fields = len(self._value_fields) > 1 or "*" in self._value_fields[0]

    def parse(self, payload: Payload) -> Delivery:
        """A message for each sensor that the payload has a reading of, and what is wrong with it or with its fields."""
        topic, content, publisher, sequence = payload[:4]
        messages: list[Message] = []
        malformed: list[MalformedPayload] = []
        is_first = False
        try:
            fields = self._decode(content)
            name = self._name_sensor(topic, fields)
            time_s = self._read_time(fields)
            if not publisher or sequence is None or sequence < 0:
                publisher, sequence = "", hash_message(topic, content)
                if time_s is None:  # its content does not tell it from the next one
                    sequence = hash_message(f"{topic}/{payload.packet_id}", content)
                    is_first = not payload.is_redelivered
            time_s = payload.received_s if time_s is None else time_s
            for field, value in self._select(fields):
                try:
                    values = self._read_values(field, value)
                    sensor = name
                    if self._names_fields:
                        sensor = _check_name(f"{name}/{field}" if name else field, f"field {field!r}")
                    messages.append(Message(sensor, values, time_s, publisher, sequence, is_first))
                except _Unusable as error:
                    malformed.append(reject_payload(topic, content, error.problem, error.reason))
            if not (messages or malformed):
                raise _Unusable("no_field", f"has no field {' or '.join(self._value_fields)} with a number")
        except _Unusable as error:
            malformed.append(reject_payload(topic, content, error.problem, error.reason))
        return Delivery(messages, malformed)

    def _decode(self, payload: bytes) -> dict[str, Any]:
        try:
            content = msgspec.json.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            text = payload.decode(errors="replace")
            if self._value_fields != (VALUE,) or text.strip().lower() not in SWITCHES:
                raise _Unusable("not_json", f"is no JSON: {error}") from None
            content = text
        if isinstance(content, dict):
            return content
        if self._value_fields == (VALUE,):
            return {VALUE: content}
        raise _Unusable("no_object", f"is no object with a field {' or '.join(self._value_fields)}")

    def _name_sensor(self, topic: str, content: dict[str, Any]) -> str:
        """A name that a forecast's topic can have: else the broker would end the connection, and deliver the message
        again."""
        if not self._sensor_field:
            return _check_name(match_wildcards(self._topic_filter, topic), "topic", is_topic=True)
        name = _find_field(content, self._sensor_field)
        is_name = isinstance(name, str | int) and not isinstance(name, bool)
        return _check_name(str(name) if is_name else "", f"field {self._sensor_field!r}")

    def _read_time(self, content: dict[str, Any]) -> float | None:
        """Seconds since the epoch; None where the message says none."""
        found = _find_field(content, self._time_field)
        if found is None:
            return None
        try:
            if isinstance(found, str) and not _is_number(found):
                moment = datetime.fromisoformat(found)
                return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
            time_s = float(found)
            if not math.isfinite(time_s) or isinstance(found, bool):
                raise ValueError("is not finite, or no number")  # as what is no date
        except (TypeError, ValueError, OverflowError):
            raise _Unusable("time", f"its {self._time_field!r} is no time: {found!r:.50}") from None
        return time_s / 1000 if abs(time_s) >= FIRST_MS else time_s

    def _select(self, content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """The fields that are asked for and are there, by their paths; of those of a pattern, the numbers."""
        seen = set[str]()
        for wanted in self._value_fields:
            if "*" not in wanted:
                if (found := _find_field(content, wanted, missing=_MISSING)) is not _MISSING and wanted not in seen:
                    seen.add(wanted)
                    yield wanted, found
                continue
            for path, value in flatten(content):
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if is_number and path != self._time_field and path not in seen and fnmatchcase(path, wanted):
                    seen.add(path)
                    yield path, value

    def _read_values(self, field: str, value: Any) -> tuple[float, ...]:
        values = tuple(_read_number(field, each) for each in (value if isinstance(value, list) else [value]))
        if not are_usable(*values):
            raise _Unusable("number", f"a number is not finite, or beyond {LARGEST_NUMBER:g}")
        if len(values) != self._width and (self._width or not values):
            raise _Unusable("width", f"has {len(values)} values, and the stream has {self._width or 'at least 1'}")
        return values


_MISSING = object()


def _find_field(content: Any, path: str, missing: Any = None) -> Any:
    """The value of a field, nested ones by dots."""
    for name in path.split("."):
        if not isinstance(content, dict) or name not in content:
            return missing
        content = content[name]
    return content


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_number(field: str, value: Any) -> float:
    """A number, also as text; ON and true are 1, OFF and false 0. Raises _Unusable for the rest, null included."""
    if isinstance(value, str) and (text := value.strip().lower()) in SWITCHES:
        return SWITCHES[text]
    if value is None:
        raise _Unusable("null", f"its {field!r} is null")
    if isinstance(value, dict | list) or (isinstance(value, str) and not _is_number(value)):
        raise _Unusable("text", f"its {field!r} is no number: {value!r:.50}")
    try:
        return float(value)
    except OverflowError:
        raise _Unusable("number", f"its {field!r} is too large") from None


def _check_name(name: str, named_by: str, *, is_topic: bool = False) -> str:
    """The name; raises _Unusable for one that a topic cannot have. is_topic: the broker has checked its characters"""
    is_name = is_topic or (bool(name) and name.isprintable() and not set("+#") & set(name))
    if not is_name or len(name) > MAX_NAME_CHARS or name.count("/") >= MAX_NAME_LEVELS:
        size = f"at most {MAX_NAME_CHARS} printable characters without + and #, in {MAX_NAME_LEVELS} levels"
        raise _Unusable("name", f"its {named_by} names no sensor: {size}")
    return name


def are_usable(*numbers: float) -> bool:
    """Whether all are finite and can be squared."""
    return all(math.isfinite(number) and abs(number) <= LARGEST_NUMBER for number in numbers)
