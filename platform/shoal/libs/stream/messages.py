"""Messages of sensors, as a topic or a file has them.

`SensorSource` of a live topic, `ReplaySource` of files, and the film site's `RatingSource` yield the same `Message`
objects, so that a trainer cannot tell them apart. Knows neither torch nor a broker.
"""

from __future__ import annotations

import math

import msgspec

from shoal.sources.source import MalformedPayload, hash_message, reject_payload

MAX_NAME_CHARS = 200
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
    matched = [level for one, level in zip(fixed, levels, strict=False) if one == "+"]
    return "/".join(matched + levels[len(fixed) :])


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
            return reject_payload(topic, payload, str(error))
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
            return reject_payload(topic, payload, problem)
        if not is_counted:
            publisher, sequence = "", hash_message(topic, payload)
        time_s = received_s if reading.time is None else reading.time
        assert sequence is not None
        return Message(sensor, values, time_s, publisher, sequence)

    def _name_sensor(self, topic: str, payload: bytes) -> str | None:
        """Return None where the field is missing or empty, or is no name that a forecast's topic can have: the
        broker would end the connection, and deliver the message again. Raises DecodeError."""
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
