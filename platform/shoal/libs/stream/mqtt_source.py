"""A topic of an MQTT 5 broker as a stream: acknowledged by hand, after the checkpoint.

MQTT has no negative acknowledgement, and forbids sending again on a live connection: "not yet learnt" can only be "not
yet acknowledged", and redelivery comes with a new connection (MQTT 5.0, sections 4.3.2, 4.4). So the session outlives
the connection: a fixed client id, clean start off, an expiry interval. `receive_maximum` bounds what the broker sends
ahead: a slow learner holds messages back in the broker, not in this process.

Called by the flow and by tests. paho's network thread only enqueues: work there would delay the keep-alive.

| queue      | capacity          | what blocks                | who unblocks            | close()              |
|------------|-------------------|----------------------------|-------------------------|----------------------|
| `_arrived` | receive_maximum   | `poll`, up to `timeout_s`  | the network thread      | `poll` returns none  |
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from shoal.errors import ConfigError, DataError, needs_extra, summarize_error
from shoal.libs.stream.messages import Payload, hash_message, reject_payload
from shoal.libs.stream.spec import MqttSpec
from shoal.sources import Delivery, MalformedPayload, Sample, StreamState

with needs_extra("stream"):
    from paho.mqtt import client as paho
    from paho.mqtt.enums import CallbackAPIVersion
    from paho.mqtt.packettypes import PacketTypes
    from paho.mqtt.properties import Properties
    from paho.mqtt.reasoncodes import ReasonCode
    from paho.mqtt.subscribeoptions import SubscribeOptions

PUBLISHER, SEQUENCE = "publisher", "sequence"  # user properties of a message
DEFAULT_PORT, TLS_PORT = 1883, 8883
KEEP_ALIVE_S = 30
CLOSE_S = 5.0
POLL_S = 1.0  # for what the broker has at hand


class _Arrival(NamedTuple):
    """connection: the count of the connection over which it came."""

    connection: int
    packet: paho.MQTTMessage
    received_s: float


class Parser(Protocol):
    """Makes messages of payloads."""

    def parse(self, payload: Payload) -> Delivery:
        """The messages of a payload, and what is wrong with it."""
        ...


class SampleParser:
    """Makes samples by a user's function of (topic, payload), which raises ValueError for what is no sample."""

    def __init__(self, decode: Callable[[str, bytes], Any]) -> None:
        self._decode = decode

    def parse(self, payload: Payload) -> Delivery:
        try:
            value = self._decode(payload.topic, payload.content)
        except ValueError as error:
            return Delivery(malformed=[reject_payload(payload.topic, payload.content, str(error))])
        if not payload.publisher or payload.sequence is None:
            return Delivery([Sample(value, "", hash_message(payload.topic, payload.content))])
        return Delivery([Sample(value, payload.publisher, payload.sequence)])


class MqttSource:
    """Messages of `spec.topic`, and answers back; as training data, `shoal.Data(train=MqttSource(spec, decode))`.

    parser: makes messages of payloads; or a function of (topic, payload) that makes samples, and raises ValueError for
            what is none
    report: called with the kind and the details of an event, from any thread: `broker_lost`, `broker_back`, `not_held`
    """

    is_exhausted = False

    def __init__(
        self,
        spec: MqttSpec,
        parser: Parser | Callable[[str, bytes], Any],
        report: Callable[..., None] = lambda kind, **details: None,
    ) -> None:
        if callable(parser):  # a dataset
            session = "name the session: the broker holds by it what is not acknowledged"
            for field, remedy in (("broker", "give it"), ("topic", "give it"), ("client_id", session)):
                if not getattr(spec, field):
                    raise ConfigError(f"mqtt.{field}", "", "is empty", remedy)
        self._spec, self._report = spec, report
        self._parser: Parser = SampleParser(parser) if callable(parser) else parser
        self._address = parse_address(spec)
        self._broker = ":".join(map(str, self._address))
        self._arrived: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._unacknowledged: deque[tuple[int, int, int]] = deque()  # delivery, connection, packet id
        self.num_delivered = 0
        self._connection = 0
        self._connected, self._rejection = threading.Event(), ""
        self._has_unheld = False  # messages that the broker does not hold
        self._client: paho.Client | None = None

    @property
    def max_unacknowledged(self) -> int:
        """Messages that the broker sends before it waits for an acknowledgement."""
        return self._spec.receive_maximum

    def example(self) -> Any:
        """The next message that comes, through a connection of its own: the session's messages stay in the broker. If
        none comes, the session's first. Raises ConfigError for a client that is rejected."""
        malformed, rejected = list[MalformedPayload](), list[str]()
        found: queue.SimpleQueue[paho.MQTTMessage] = queue.SimpleQueue()
        client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        client.on_message = lambda client, data, packet: found.put(packet)

        def subscribe(client: paho.Client, data: Any, flags: Any, reason: ReasonCode, properties: Any) -> None:
            if reason.is_failure:
                rejected.append(str(reason))
            client.subscribe(self._spec.topic, qos=0)

        client.on_connect = subscribe
        self._connect(client, Properties(PacketTypes.CONNECT), clean=True)
        deadline_s = time.monotonic() + self._spec.connect_timeout_s
        try:
            while (left_s := deadline_s - time.monotonic()) > 0:
                parsed = self._parse(found.get(timeout=left_s), time.time())
                if parsed.messages:
                    return parsed.messages[0]
                malformed += parsed.malformed
        except queue.Empty:
            pass
        finally:
            client.disconnect()
            client.loop_stop()
        if rejected:
            raise self._make_error(f"rejects this client ({rejected[0]})")
        if self._spec.client_id:  # a message that the broker holds for the session, which stays there
            self.open(StreamState())
            try:
                if (waiting := next(iter(self.poll(1, POLL_S).messages), None)) is not None:
                    return waiting
            finally:
                self.close()
        problem, remedy = f"no message came in {self._spec.connect_timeout_s:g} s", "start the publishers"
        if malformed:
            last = malformed[-1]
            problem = f"none of {len(malformed)} messages is a reading: {last.origin} {last.problem}: {last.text!r}"
            remedy = "name the field: mqtt.value_field=FIELD"
        remedy += ", correct the topic, or wait longer: mqtt.connect_timeout_s=400"
        raise DataError("mqtt.topic", self._spec.topic, problem, remedy)

    def open(self, state: StreamState) -> None:
        """Take up the session. Raises ConfigError when no broker answers, or it rejects this client.

        `state` is not needed: the broker knows what was acknowledged.
        """
        client = paho.Client(CallbackAPIVersion.VERSION2, self._spec.client_id, protocol=paho.MQTTv5, manual_ack=True)
        client.on_connect, client.on_disconnect = self._take_up, self._lose
        client.on_message = lambda _, data, packet: self._arrived.put(_Arrival(self._connection, packet, time.time()))
        client.on_subscribe = self._begin
        client.on_socket_open = send_at_once
        client.reconnect_delay_set(1, 10)
        properties = Properties(PacketTypes.CONNECT)
        properties.SessionExpiryInterval = self._spec.session_expiry_s
        properties.ReceiveMaximum = self._spec.receive_maximum
        self._client = client
        self._connect(client, properties, clean=False)
        if not self._connected.wait(self._spec.connect_timeout_s):
            self.close()
            rejects = f"rejects this client ({self._rejection})"
            raise self._make_error(rejects if self._rejection else "did not accept the connection")

    def _connect(self, client: paho.Client, properties: Properties, *, clean: bool) -> None:
        host, port = self._address
        if self._spec.username:
            client.username_pw_set(self._spec.username, self._spec.password.get_secret_value())
        if self._spec.has_tls:
            client.tls_set()
        client.connect_timeout = self._spec.connect_timeout_s
        try:
            client.connect(host, port, KEEP_ALIVE_S, clean_start=clean, properties=properties)
        except OSError as error:
            raise self._make_error(f"does not answer ({summarize_error(error)})") from None
        client.loop_start()

    def _make_error(self, problem: str) -> ConfigError:
        host, port = self._address
        remedy = f"start a broker at host {host}, port {port}, or leave it out: a private one is started"
        return ConfigError("mqtt.broker", self._broker, problem, remedy)

    # -- the network thread

    def _take_up(
        self, client: paho.Client, data: Any, flags: paho.ConnectFlags, reason: ReasonCode, *rest: Any
    ) -> None:
        if reason.is_failure:
            return self._reject(reason)
        self._connection += 1
        self._subscribe(client)
        if self._connection > 1:
            self._report("broker_back", has_session=bool(flags.session_present))

    def _subscribe(self, client: paho.Client) -> None:
        is_shared = self._spec.topic.startswith("$share/")  # MQTT forbids it there
        unwanted = SubscribeOptions.RETAIN_DO_NOT_SEND  # and not the own forecasts, where the topic matches them
        options = SubscribeOptions(qos=1, noLocal=not is_shared, retainHandling=unwanted)
        client.subscribe(self._spec.topic, options=options)

    def _begin(self, client: paho.Client, data: Any, number: int, reasons: Sequence[ReasonCode], *rest: Any) -> None:
        """The broker has the subscription: what is published from now on comes."""
        for reason in reasons:
            if reason.is_failure:
                return self._reject(reason)
        self._connected.set()

    def _reject(self, reason: ReasonCode) -> None:
        self._rejection = str(reason)
        self._report("broker_rejects", broker=self._broker, reason=self._rejection)

    def _lose(self, client: paho.Client, data: Any, flags: Any, reason: ReasonCode, *rest: Any) -> None:
        was_connected = self._connected.is_set()
        self._connected.clear()
        if was_connected and reason.is_failure:
            self._report("broker_lost", broker=self._broker, reason=str(reason))

    # -- the caller's thread

    def poll(self, max_messages: int, timeout_s: float) -> Delivery:
        messages: list[Any] = []
        malformed: list[MalformedPayload] = []
        num_redelivered, received_s = 0, 0.0
        while len(messages) + len(malformed) < max_messages:
            try:
                is_first = not (messages or malformed)
                arrival = self._arrived.get(timeout=timeout_s) if is_first else self._arrived.get_nowait()
            except queue.Empty:
                break
            if arrival.packet.qos and arrival.connection != self._connection:
                continue  # the broker sends it again over the present connection
            self.num_delivered += 1
            if arrival.packet.qos:
                self._unacknowledged.append((self.num_delivered, arrival.connection, arrival.packet.mid))
            elif not self._has_unheld:
                self._has_unheld = True
                self._report("not_held", topic=arrival.packet.topic)
            num_redelivered += arrival.packet.dup
            received_s = arrival.received_s
            parsed = self._parse(arrival.packet, arrival.received_s)
            messages += parsed.messages
            malformed += parsed.malformed
        return Delivery(messages, malformed, num_redelivered, received_s)

    def _parse(self, packet: paho.MQTTMessage, received_s: float) -> Delivery:
        names: dict[str, str] = dict(getattr(packet.properties, "UserProperty", ()))
        sequence = names.get(SEQUENCE, "")
        counted = int(sequence) if sequence.isdecimal() and len(sequence) < 19 else None  # the log has 64 bits
        content, publisher = bytes(packet.payload), names.get(PUBLISHER, "")
        return self._parser.parse(
            Payload(packet.topic, content, publisher, counted, received_s, packet.mid, packet.dup)
        )

    def commit(self, state: StreamState) -> None:
        """Acknowledge in the order of delivery, as MQTT demands (section 4.6). What came over an earlier connection
        comes again, and is acknowledged then."""
        assert self._client is not None
        while self._unacknowledged and self._unacknowledged[0][0] <= state.num_delivered:
            _, connection, packet_id = self._unacknowledged.popleft()
            if connection == self._connection:
                self._client.ack(packet_id, 1)

    def publish(self, topic: str, payload: bytes) -> None:
        """Send at most once (QoS 0)."""
        if self._client is not None:
            self._client.publish(topic, payload)

    def close(self) -> None:
        """Leave the session in the broker, which has every acknowledgement by then: else it would send those messages
        again to a connection that comes before it has read this one to its end."""
        if self._client is not None:
            if self._connected.is_set():
                self._connected.clear()
                self._subscribe(self._client)  # answered in order: after all that was sent before
                self._connected.wait(CLOSE_S)
            self._client.disconnect()
            self._client.loop_stop()
            self._client = None
            self._arrived = queue.SimpleQueue()  # what was not polled goes to the next session


def send_at_once(client: paho.Client, data: Any, opened: Any) -> None:
    """Small packets leave without Nagle's algorithm, by which each waits for the acknowledgement of the one before."""
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def parse_address(spec: MqttSpec) -> tuple[str, int]:
    """Host and port of `spec.broker`. Raises ConfigError."""
    host, separator, port = spec.broker.removeprefix("mqtt://").rpartition(":")
    if not separator:
        return port, TLS_PORT if spec.has_tls else DEFAULT_PORT
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError("mqtt.broker", spec.broker, "has no port after the colon", "write HOST:PORT")
    return host.strip("[]"), int(port)
