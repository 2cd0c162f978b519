"""Payloads, duplicates, and the test for drift: each against an oracle or by its bytes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.client import topic_matches_sub

from shoal.errors import DataError
from shoal.libs.stream.fleet import make_topic
from shoal.libs.stream.messages import Message, MessageParser, Payload, encode_payload, match_wildcards
from shoal.libs.stream.replay_source import ReplaySource
from shoal.libs.stream.trainer import PageHinkley
from shoal.sources.source import Deduplicator, Delivery, MalformedPayload, StreamState
from stream_contract import check_source


def parse_one(
    parser: MessageParser, topic: str, payload: bytes, publisher: str = "p", sequence: int | None = 1
) -> Message:
    found = parser.parse(Payload(topic, payload, publisher, sequence, 99.0))
    assert not found.malformed
    (message,) = found.messages
    return message


def find_problem(parser: MessageParser, topic: str, payload: bytes) -> MalformedPayload:
    found = parser.parse(Payload(topic, payload, "", None, 99.0))
    assert not found.messages
    (malformed,) = found.malformed
    assert malformed.origin == topic
    return malformed


def test_a_payload_is_read_as_it_was_written() -> None:
    for values in ((21.5,), (1.0, -2.0)):
        parsed = parse_one(MessageParser(len(values)), "a/b/s1", encode_payload(values, 12.25), "p", 3)
        assert parsed == Message("s1", values, 12.25, "p", 3)
    assert parse_one(MessageParser(1), "s1", b'{"value": 2}') == Message("s1", (2.0,), 99.0, "p", 1)


@pytest.mark.parametrize(
    ("payload", "reason", "problem"),
    [
        (b"warm", "not_json", "is no JSON"),
        (b'"warm"', "text", "'value' is no number: 'warm'"),
        (b'{"value": "warm", "time": 1}', "text", "'value' is no number: 'warm'"),
        (b'{"value": {"x": 1}, "time": 1}', "text", "is no number"),
        (b'{"value": null}', "null", "'value' is null"),
        (b'{"temperature": 2}', "no_field", "has no field value"),
        (b"[]", "width", "has 0 values"),
        (b'{"value": NaN, "time": 1}', "not_json", "malformed"),
        (b'{"value": 1e99999, "time": 1}', "number|not_json", "finite|out of range"),
        (b'{"value": [1, 2], "time": 1}', "width", "has 2 values, and the stream has 1"),
        (b'{"value": 1, "time": "noon"}', "time", "'time' is no time: 'noon'"),
        (b'{"value": 1, "time": true}', "time", "is no time"),
        (b'{"value": 1, "time": "inf"}', "time", "is no time"),
        (b"\xff\xfe", "not_json", "malformed|invalid|UTF-8"),
        (b"[" * 2000, "not_json", "recursion"),
        (b"1" + b"0" * 400, "number", "too large"),
        (b'{"value": 1' + b"0" * 400 + b"}", "number", "too large"),
    ],
)
def test_what_is_no_reading_says_why(payload: bytes, reason: str, problem: str) -> None:
    malformed = find_problem(MessageParser(1), "s1", payload)
    assert re.fullmatch(reason, malformed.reason)
    assert re.search(problem, malformed.problem), malformed.problem
    assert malformed.text == payload.decode(errors="backslashreplace")[:200]


ZIGBEE = b'{"temperature": 21.4, "humidity": 40, "linkquality": 80, "battery": null, "contact": true, "state": "ON"}'
TASMOTA = b"""{"Time": "2025-05-31T10:00:00", "AM2301": {"Temperature": 21.4, "Humidity": 40, "Id": "7"},
    "ENERGY": {"Power": 12, "Period": [1, 2]}, "TempUnit": "C"}"""


@pytest.mark.parametrize(
    ("payload", "fields", "readings", "reasons"),
    [
        (ZIGBEE, ("temperature",), {"kitchen": 21.4}, []),
        (ZIGBEE, ("contact",), {"kitchen": 1.0}, []),
        (ZIGBEE, ("state",), {"kitchen": 1.0}, []),
        (ZIGBEE, ("battery",), {}, ["null"]),
        (ZIGBEE, ("pressure",), {}, ["no_field"]),
        (ZIGBEE, ("humidity", "temperature"), {"kitchen/humidity": 40.0, "kitchen/temperature": 21.4}, []),
        (ZIGBEE, ("temperature", "battery", "pressure"), {"kitchen/temperature": 21.4}, ["null"]),
        (
            ZIGBEE,
            ("*", "state", "humidity"),
            {f"kitchen/{name}": each for name, each in
             [("temperature", 21.4), ("humidity", 40), ("linkquality", 80), ("state", 1)]},
            [],
        ),
        (TASMOTA, ("ENERGY.Power",), {"kitchen": 12.0}, []),
        (TASMOTA, ("AM2301.Id",), {"kitchen": 7.0}, []),
        (TASMOTA, ("AM2301",), {}, ["text"]),
        (TASMOTA, ("AM2301.*",), {"kitchen/AM2301.Temperature": 21.4, "kitchen/AM2301.Humidity": 40.0}, []),
        (TASMOTA, ("Time.Temperature", "TempUnit"), {}, ["text"]),
        (b'{"a/+": 1, "b": 2, "Time": 3}', ("*",), {"kitchen/b": 2.0}, ["name"]),
        (b"Online", ("*",), {}, ["not_json"]),
        (b"21", ("temperature",), {}, ["no_object"]),
        (b"21.5", ("value",), {"kitchen": 21.5}, []),
        (b"ON", ("value",), {"kitchen": 1.0}, []),
        (b"off", ("value",), {"kitchen": 0.0}, []),
        (b'"21.5"', ("value",), {"kitchen": 21.5}, []),
        (b"false", ("value",), {"kitchen": 0.0}, []),
    ],
)  # fmt: skip
def test_fields_of_zigbee2mqtt_and_tasmota_are_sensors(
    payload: bytes, fields: tuple[str, ...], readings: dict[str, float], reasons: list[str]
) -> None:
    found = MessageParser(1, "tele/+/#", "", fields, "Time").parse(Payload("tele/kitchen", payload, "", None, 99.0))
    assert {message.sensor: message.values for message in found.messages} == {k: (v,) for k, v in readings.items()}
    assert [each.reason for each in found.malformed] == reasons
    assert {message.time_s for message in found.messages} <= {1748685600.0, 99.0, 3.0}
    assert len({message.sequence for message in found.messages}) <= 1


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("1748685600", 1748685600.0),
        ("1748685600250", 1748685600.25),
        ('"1748685600"', 1748685600.0),
        ('"2025-05-31T10:00:00"', 1748685600.0),
        ('"2025-05-31T12:00:00+02:00"', 1748685600.0),
        ('"2025-05-31T10:00:00.250Z"', 1748685600.25),
        ("null", 99.0),
    ],
)
def test_a_time_is_of_unix_or_of_iso_8601(time: str, expected: float) -> None:
    parser = MessageParser(1, "+", "", ("t",), "device.seen")
    payload = f'{{"t": 1, "time": "noon", "device": {{"seen": {time}}}}}'.encode()
    assert parse_one(parser, "s", payload).time_s == expected


def test_equal_payloads_without_a_time_are_different_readings_unless_the_broker_repeats_one() -> None:
    parser, deduplicator = MessageParser(1), Deduplicator()

    def admit(packet_id: int, is_redelivered: bool = False) -> bool:
        (message,) = parser.parse(Payload("s", b"21.5", "", None, 99.0, packet_id, is_redelivered)).messages
        return deduplicator.admit(message, message.is_first)

    assert [admit(7), admit(8), admit(8, True), admit(9, True), admit(9, True)] == [True, True, False, True, False]
    assert [admit(7), admit(7), admit(7, True)] == [True, True, False]  # a broker that takes numbers again
    assert [admit(0), admit(0)] == [True, True]  # of QoS 0: it never repeats them


@pytest.mark.parametrize(
    ("topic_filter", "topic", "sensor"),
    [
        ("plant/+/temperature", "plant/oven/temperature", "oven"),
        ("plant/+/line/+/temperature", "plant/4/line/2/temperature", "4/2"),
        ("plant/#", "plant/oven/temperature", "oven/temperature"),
        ("+/line/#", "north/line/2/hot", "north/2/hot"),
        ("plant/#", "plant", ""),
        ("#", "plant/oven", "plant/oven"),
        ("plant/+", "plant/", ""),
        ("$share/learners/plant/+/temperature", "plant/oven/temperature", "oven"),
        ("plant/oven/temperature", "plant/oven/temperature", "temperature"),
        ("plant/+/temperature", "plant/oven", "oven"),
        ("plant/+", "shed/oven/2", "2"),
    ],
)
def test_what_the_wildcards_match_names_the_sensor(topic_filter: str, topic: str, sensor: str) -> None:
    assert match_wildcards(topic_filter, topic) == sensor
    parsed = parse_one(MessageParser(1, topic_filter), topic, encode_payload((1.0,), 2.0))
    assert parsed == Message(sensor, (1.0,), 2.0, "p", 1)


@pytest.mark.parametrize("topic_filter", ["shoal/sensors/+", "plant/+/line/+/t", "plant/#"])
def test_simulated_sensors_differ_by_their_topics(topic_filter: str) -> None:
    topics = [make_topic(topic_filter, name) for name in ("s1", "s2")]
    assert all(topic_matches_sub(topic_filter, topic) for topic in topics)
    assert len({match_wildcards(topic_filter, topic) for topic in topics}) == 2


@pytest.mark.parametrize(
    ("name", "sensor"),
    [
        *[('"oven"', "oven"), ("7", "7"), ('"a/b"', "a/b"), ('"a+"', None), ('""', None), ("[1]", None)],
        # A broker ends the connection of who publishes to these, and so the message would come again for ever.
        *[('"a\\nb"', None), ('"\\u0085"', None), ('"\\uffff"', None), (f'"{"/" * 150}"', None)],
    ],
)
def test_a_field_of_the_payload_names_the_sensor(name: str, sensor: str | None) -> None:
    parser = MessageParser(1, "plant/+", "probe")
    payload = f'{{"value": 1, "time": 2, "probe": {name}}}'.encode()
    if sensor is None:
        assert "'probe' names no sensor" in find_problem(parser, "plant/x", payload).problem
    else:
        assert parse_one(parser, "plant/x", payload) == Message(sensor, (1.0,), 2.0, "p", 1)
    assert "'probe' names no sensor" in find_problem(parser, "plant/x", b'{"value": 1, "time": 2}').problem


@pytest.mark.parametrize("topic", ["a" * 65_535, "/" * 199])
def test_a_topic_whose_forecasts_no_broker_takes_is_malformed(topic: str) -> None:
    malformed = find_problem(MessageParser(1, "#"), topic, encode_payload((1.0,), 2.0))
    assert "its topic names no sensor: at most 200 printable characters" in malformed.problem


@given(st.lists(st.integers(1, 60), max_size=80))
def test_each_sequence_is_admitted_once(sequences: list[int]) -> None:
    deduplicator, seen = Deduplicator(window=64), set[int]()
    for sequence in sequences:
        assert deduplicator.admit(Message("s", (0.0,), 0.0, "p", sequence)) == (sequence not in seen)
        seen.add(sequence)
        again = Deduplicator(window=64)
        again.load_state_dict(deduplicator.state_dict())
        assert again.state_dict() == deduplicator.state_dict()
        deduplicator = again
    if seen:
        missing = set(range(sequences[0], max(seen) + 1)) - seen
        assert deduplicator.num_gaps == len(missing) if min(seen) == sequences[0] else True
        assert deduplicator.sequences == {"p": max(seen)}


def test_a_publisher_that_counts_anew_is_noticed_and_one_without_a_name_is_compared_by_hash() -> None:
    deduplicator = Deduplicator(window=4)
    assert deduplicator.admit(Message("s", (0.0,), 0.0, "p", 10))
    assert not deduplicator.admit(Message("s", (0.0,), 0.0, "p", 1))
    assert (deduplicator.num_stale, deduplicator.num_duplicates) == (1, 1)
    first, other = (parse_one(MessageParser(1), "s", encode_payload((1.0,), at), "", None) for at in (1.0, 2.0))
    assert [deduplicator.admit(each) for each in (first, other, first)] == [True, True, False]


def find_drift(errors: list[float], tolerance: float, threshold: float, min_count: int) -> list[int]:
    """The test of Page and Hinkley as it is printed, of one series."""
    found = []
    count = 0
    total = 0.0
    cumulated = 0.0
    lowest = 0.0
    for at, error in enumerate(errors):
        count, total = count + 1, total + error
        cumulated += error - total / count - tolerance
        lowest = min(lowest, cumulated)
        if cumulated - lowest > threshold and count >= min_count:
            found.append(at)
            count = 0
            total = 0.0
            cumulated = 0.0
            lowest = 0.0
    return found


def test_drift_is_noticed_as_by_one_series_at_a_time() -> None:
    random = np.random.default_rng(0)
    errors = random.exponential(1.0, (3, 400))
    errors[1, 200:] += 3.0
    errors[2, 100:] += 1.5
    test = PageHinkley(0.25, 30.0, 50)
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for at in range(errors.shape[1]):
        for sensor in test.update(np.arange(3), errors[:, at]):
            found[int(sensor)].append(at)
    assert found == {sensor: find_drift(errors[sensor].tolist(), 0.25, 30.0, 50) for sensor in range(3)}
    assert not found[0]
    assert 200 <= found[1][0] < 230


def replay(path: Path, num_learnt: int = 0) -> Delivery:
    """What a source has of the files, after so many rows."""
    source = ReplaySource([str(path)])
    source.open(StreamState(0, {path.name: num_learnt}))
    delivery = source.poll(8, 0.0)
    assert source.is_exhausted
    return delivery


def test_files_of_all_kinds_give_the_same_messages(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import csv, parquet

    table = pa.table({"sensor": ["a", "b", "a"], "value": [1.0, 2.0, 3.0], "time": [10.0, 11.0, 12.0]})
    parquet.write_table(table, tmp_path / "x.parquet")
    csv.write_csv(table, tmp_path / "x.csv")
    rows = table.to_pylist()
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for path in sorted(tmp_path.iterdir()):
        expected = [
            Message(row["sensor"], (row["value"],), row["time"], path.name, at) for at, row in enumerate(rows, 1)
        ]
        assert ReplaySource([str(path)]).example() == expected[0]
        assert replay(path).messages == expected
        assert replay(path, 2).messages == expected[2:]


def test_files_keep_the_contract_of_sources(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("value,time\n" + "".join(f"{at}.5,{at}\n" for at in range(9)))
    expected = [Message("x", (at + 0.5,), float(at), "x.csv", at + 1) for at in range(9)]
    check_source(lambda: ReplaySource([str(tmp_path / "x.csv")]), expected)


def test_files_with_gaps_name_the_row_and_others_the_file(tmp_path: Path) -> None:
    (tmp_path / "gaps.csv").write_text("value,time\n1.5,1\n,2\n2.5,3\n")
    delivery = replay(tmp_path / "*.csv")
    assert [message.values for message in delivery.messages] == [(1.5,), (2.5,)]
    assert [message.sensor for message in delivery.messages] == ["gaps", "gaps"]
    assert delivery.malformed[0].origin == "gaps.csv, row 2"
    (tmp_path / "other.csv").write_text("reading\n1\n")
    (tmp_path / "empty.csv").write_text("value\n")
    for name, problem in (
        ("other.csv", "columns reading"),
        ("none.csv", "no such file"),
        ("empty.csv", "no row"),
        ("a.txt", "kind"),
    ):
        with pytest.raises(DataError, match=f"{name}.*{problem}"):
            ReplaySource([str(tmp_path / name)]).example()


def test_times_may_be_dates_and_a_missing_one_is_malformed(tmp_path: Path) -> None:
    """Of UTC, whatever this machine's zone."""
    path = tmp_path / "x.csv"
    for first, second, later_s in (("2026-01-01 00:00:00", "2026-01-01 01:00:00", [3600.0]), ("2026-01-01", "", [])):
        path.write_text(f"value,time\n1.5,{first}\n2,{second}\n")
        delivery = replay(path)
        assert [message.time_s - 1767225600.0 for message in delivery.messages] == [0.0, *later_s]
        assert len(delivery.malformed) == 1 - len(later_s)
