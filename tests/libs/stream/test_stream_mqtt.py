"""A stream from a real mosquitto: delivery, acknowledgement, kill -9, and what users see of faults."""

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt import client as paho
from stream_case import SMALL, differing_tensors, make_messages, relearn

from broker_rig import connected, publish_all
from shoal.cluster.ports import find_free_port
from shoal.errors import ConfigError, DataError
from shoal.libs.stream import mqtt as mqtt_module
from shoal.libs.stream.batch_log import read_batches
from shoal.libs.stream.loop import StreamLoop
from shoal.libs.stream.messages import Message, encode_payload
from shoal.libs.stream.mqtt import PrivateBroker, SensorSource
from shoal.libs.stream.spec import CommitSpec, SensorTopicSpec
from shoal.libs.stream.trainer import OnlineTrainer, SensorForecast
from shoal.sources.source import MalformedPayload, StreamState
from stream_contract import check_source
from waiting import wait_for


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateBroker]:
    with PrivateBroker(tmp_path_factory.mktemp("broker")) as started:
        yield started


@pytest.fixture
def spec(broker: PrivateBroker, request: pytest.FixtureRequest) -> SensorTopicSpec:
    """Topics and a session of the test's own."""
    name = request.node.name.partition("[")[0]
    return SensorTopicSpec(broker=broker.address, topic=f"{name}/+", answers=f"{name}-answers", client_id=name)


@contextmanager
def opened(spec: SensorTopicSpec, report: Callable[..., None] = lambda kind, **details: None) -> Iterator[SensorSource]:
    source = SensorSource(spec, 1, report)
    source.open(StreamState())
    yield source
    source.close()


def publish(spec: SensorTopicSpec, packets: list[tuple[str, bytes, int | None]], **options: Any) -> None:
    """Publish (sensor, payload, sequence)."""
    publish_all(spec.broker, [(spec.topic.replace("+", sensor), *rest) for sensor, *rest in packets], **options)


def begin_session(spec: SensorTopicSpec) -> None:
    """From now on, the broker holds messages for it."""
    with opened(spec):
        pass


def make_packets(first: int, last: int) -> list[tuple[str, bytes, int | None]]:
    return [(f"s{at % 3}", encode_payload((at / 7,), float(at)), at) for at in range(first, last + 1)]


def poll(source: SensorSource, count: int) -> list[Message]:
    """The next `count` messages."""
    found: list[Message] = []
    wait_for(lambda: found.extend(source.poll(count - len(found), 0.1).messages) or len(found) == count)
    return found


def poll_sequences(source: SensorSource, count: int) -> list[int]:
    return [message.sequence for message in poll(source, count)]


def test_a_topic_keeps_the_contract_of_sources(spec: SensorTopicSpec) -> None:
    begin_session(spec)
    publish(spec, make_packets(1, 9))
    expected = [Message(f"s{at % 3}", (at / 7,), float(at), "p", at) for at in range(1, 10)]
    check_source(lambda: SensorSource(spec, 1), expected)


def test_messages_of_qos_0_are_taken_and_not_acknowledged(spec: SensorTopicSpec) -> None:
    """An acknowledgement without a packet's number would end the connection."""
    events: list[str] = []
    with opened(spec, lambda kind, **details: events.append(kind)) as source:
        publish(spec, [("s", b"21.5", None)] * 3, qos=0)
        assert all(message.is_first for message in poll(source, 3))
        source.commit(StreamState(num_delivered=3))
    assert events == ["not_held"]


def test_what_was_acknowledged_before_a_close_does_not_come_again(tmp_path: Path) -> None:
    """Though the broker takes its time, and then finds the next connection of the session beside the last one."""
    with PrivateBroker(tmp_path) as broker:
        spec = SensorTopicSpec(broker=broker.address, topic="slow/+", client_id="slow")
        with opened(spec) as source:
            publish(spec, make_packets(1, 40))
            assert len(poll(source, 40)) == 40
            stop, go_on = (partial(os.kill, broker._process.pid, each) for each in (signal.SIGSTOP, signal.SIGCONT))
            stop()
            threading.Timer(0.5, go_on).start()
            source.commit(StreamState(num_delivered=40))
        with opened(spec) as again:
            publish(spec, make_packets(41, 41))
            assert [message.sequence for message in again.poll(10, 30).messages] == [41]


def test_what_is_published_once_a_source_is_open_comes(spec: SensorTopicSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the broker takes to have the subscription."""
    subscribe = paho.Client.subscribe

    def subscribe_late(client: paho.Client, *words: Any, **options: Any) -> None:
        threading.Timer(0.5, subscribe, (client, *words), options).start()

    monkeypatch.setattr(paho.Client, "subscribe", subscribe_late)
    with opened(spec) as source:
        publish(spec, make_packets(1, 3))
        assert poll_sequences(source, 3) == [1, 2, 3]


def test_an_example_is_not_consumed(spec: SensorTopicSpec) -> None:
    found: queue.SimpleQueue[Message] = queue.SimpleQueue()
    asking = threading.Thread(target=lambda: found.put(SensorSource(spec, 1).example()))
    with opened(spec) as source:
        asking.start()
        sequence = 0
        while found.empty() and sequence < 1000:
            sequence += 1
            publish(spec, make_packets(sequence, sequence))
        asking.join()
        assert isinstance(found.get(), Message)
        assert poll_sequences(source, sequence) == list(range(1, sequence + 1))


def test_the_broker_sends_no_more_than_the_window_before_an_acknowledgement(spec: SensorTopicSpec) -> None:
    """A slow consumer holds messages back in the broker."""
    with opened(spec.model_copy(update={"receive_maximum": 5})) as source:
        publish(spec, make_packets(1, 30))
        assert poll_sequences(source, 5) == [1, 2, 3, 4, 5]
        assert source.poll(100, 0.3).messages == []
        source.commit(StreamState(num_delivered=3))
        assert poll_sequences(source, 3) == [6, 7, 8]


def test_a_broker_that_is_down_is_named_with_host_and_port() -> None:
    port = find_free_port()
    for call in ("open", "example"):
        source = SensorSource(SensorTopicSpec(broker=f"127.0.0.1:{port}", client_id="x"), 1)
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*refused.*host 127\.0\.0\.1, port {port}"):
            source.open(StreamState()) if call == "open" else source.example()
    with pytest.raises(ConfigError, match="HOST:PORT"):
        SensorSource(SensorTopicSpec(broker="there:x"), 1)


def test_a_broker_that_rejects_the_client_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mqtt_module, "CONFIG", mqtt_module.CONFIG.replace("allow_anonymous true", ""))
    with PrivateBroker(tmp_path / "broker") as broker:
        spec = SensorTopicSpec(broker=broker.address, client_id="x", username="who", connect_timeout_s=1.0)
        with pytest.raises(ConfigError, match=r"rejects this client .*[Nn]ot authorized"):
            SensorSource(spec, 1).open(StreamState())


def test_a_connection_with_tls_delivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    monkeypatch.setattr(mqtt_module, "CONFIG", f"{mqtt_module.CONFIG}certfile {certificate}\nkeyfile {key}\n")
    with PrivateBroker(tmp_path / "broker") as broker:
        spec = SensorTopicSpec(broker=broker.address, topic="t/+", answers="t", client_id="tls", has_tls=True)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        malformed = list[MalformedPayload]()
        with opened(spec) as source, opened(spec.model_copy(update={"client_id": "other"})) as other:
            forecasts = [SensorForecast(message, 1.0, 0) for message in make_messages(100)]
            source.publish_forecasts(forecasts)  # which do not come back
            other.publish_forecasts([each._replace(num_updates=7) for each in forecasts])
            while len(malformed) < len(forecasts):
                malformed += wait_for(lambda: source.poll(100, 0.1).malformed, what="messages")
        assert all('"updates":7' in each.text for each in malformed)


def test_a_topic_without_readings_is_named(spec: SensorTopicSpec) -> None:
    hasty = spec.model_copy(update={"connect_timeout_s": 0.3, "client_id": ""})
    with pytest.raises(DataError, match="no message came"):
        SensorSource(hasty, 1).example()
    publish(spec, [("oven", b'{"heat": 21}', None)], retain=True)
    with pytest.raises(DataError, match=r"none of 1 messages .*oven has no field value .*heat.*mqtt.value_field=FIELD"):
        SensorSource(hasty, 1).example()


def run_loop(
    spec: SensorTopicSpec, folder: Path, stop: Callable[[StreamLoop], bool]
) -> tuple[StreamLoop, list[tuple[str, dict[str, Any]]]]:
    events: list[tuple[str, dict[str, Any]]] = []
    source = SensorSource(spec, 1, lambda kind, **details: events.append((kind, details)))
    loop = StreamLoop(
        OnlineTrainer(SMALL),
        source,
        folder,
        CommitSpec(messages=20, interval_s=0.1, keep_log=True),
        source.publish_forecasts,
        lambda kind, **details: events.append((kind, details)),
    )
    loop.run(lambda: stop(loop))
    return loop, events


@contextmanager
def receive_forecasts(spec: SensorTopicSpec) -> Iterator[queue.SimpleQueue[paho.MQTTMessage]]:
    answers: queue.SimpleQueue[paho.MQTTMessage] = queue.SimpleQueue()
    subscribed = threading.Event()
    with connected(spec.broker) as client:
        client.on_message = lambda client, data, packet: answers.put(packet)
        client.on_subscribe = lambda *details: subscribed.set()
        client.subscribe(f"{spec.answers}/#")
        assert subscribed.wait(30)
        yield answers


def test_malformed_payloads_and_clock_jumps_are_counted_and_answers_come_back(
    spec: SensorTopicSpec, tmp_path: Path
) -> None:
    begin_session(spec)
    packets = make_packets(1, 12)
    packets.insert(3, ("s1", b"hot", None))
    packets.insert(5, ("s1", b'{"value": null}', 99))
    packets[8] = (packets[8][0], encode_payload((1.0,), -100.0), packets[8][2])
    with receive_forecasts(spec) as answers:
        publish(spec, packets)
        loop, events = run_loop(spec, tmp_path, lambda loop: loop.trainer.totals.num_messages >= 12)
        received = [json.loads(answers.get(timeout=600).payload) for _ in range(12)]
    assert (loop.malformed.total(), loop.trainer.totals.num_clock_jumps) == (2, 1)
    malformed = [details for kind, details in events if kind == "malformed"]
    assert [(each["reason"], each["text"]) for each in malformed] == [("not_json", "hot"), ("null", '{"value": null}')]
    assert [each["sequence"] for each in received] == list(range(1, 13))
    with opened(spec) as again:  # all was acknowledged, the malformed ones too
        assert again.poll(1, 0.3).messages == []


def test_sensors_of_a_wildcard_are_not_merged_and_each_has_a_topic_of_forecasts(
    spec: SensorTopicSpec, tmp_path: Path
) -> None:
    own = spec.model_copy(update={"topic": spec.topic.replace("+", "+/line/+/temperature")})
    begin_session(own)
    with receive_forecasts(own) as answers:
        publish(own, [(f"s{at % 3}", encode_payload((float(at),), float(at)), at) for at in range(6)])
        loop, _ = run_loop(own, tmp_path, lambda loop: loop.trainer.totals.num_messages >= 6)
        topics = [answers.get(timeout=600).topic for _ in range(6)]
    assert len(loop.trainer.table) == 3
    assert topics == 2 * [f"{own.answers}/s{number}/s{number}" for number in range(3)]


def test_a_broker_that_goes_and_comes_back_costs_no_message(spec: SensorTopicSpec, tmp_path: Path) -> None:
    folder, port = tmp_path / "broker", find_free_port()
    broker = PrivateBroker(folder, port)
    own = spec.model_copy(update={"broker": broker.address})
    restarted: list[PrivateBroker] = []

    def stop(loop: StreamLoop) -> bool:
        if not restarted and loop.trainer.totals.num_messages >= 10:
            broker.close()
            restarted.append(PrivateBroker(folder, port))
            publish(own, make_packets(11, 20))
        return loop.trainer.totals.num_messages >= 20

    begin_session(own)
    publish(own, make_packets(1, 10))
    try:
        loop, events = run_loop(own, tmp_path / "run", stop)
    finally:
        for each in (broker, *restarted):
            each.close()
    learnt = [message.sequence for batch in read_batches(tmp_path / "run" / "log") for message in batch.messages]
    assert learnt == list(range(1, 21))
    kinds = [kind for kind, _ in events]
    assert kinds.count("broker_lost") == kinds.count("broker_back") == 1
    assert dict(events)["broker_back"] == {"has_session": True}
    assert differing_tensors(loop.trainer.state_dict(), relearn(tmp_path / "run").state_dict()) == []


def test_a_sequence_beyond_64_bits_does_not_count(spec: SensorTopicSpec) -> None:
    with opened(spec) as source:
        publish(spec, [("s1", encode_payload((1.0,), 2.0), 10**30)])
        (message,) = poll(source, 1)
    assert message.publisher == ""
    assert message.sequence < 2**64
