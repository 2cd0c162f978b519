"""Simulated sensors: each publishes a reading at a steady rate, counted, at least once (QoS 1).

    python -m shoal.libs.stream.fleet --broker 127.0.0.1:1883 --sensors 1000 --rate-hz 1 [--messages 60000] [--answers]

A reading is a daily wave of the sensor's own phase, with noise; after `DRIFT_AFTER` readings, every tenth sensor halves
its period. Sensors are spread evenly over a period of their rate. With `--answers`, prints how long the forecasts took:
from just before the publication of a reading to the arrival of its forecast, one process and one clock.

Started by the flow as a process of its own, which ends when its standard input closes; also by tests and benchmarks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from shoal.errors import ConfigError, needs_extra
from shoal.libs.stream.messages import encode_payload
from shoal.libs.stream.mqtt_source import KEEP_ALIVE_S, PUBLISHER, SEQUENCE, parse_address, send_at_once
from shoal.libs.stream.spec import SensorTopicSpec

with needs_extra("stream"):
    from paho.mqtt import client as paho
    from paho.mqtt.enums import CallbackAPIVersion
    from paho.mqtt.packettypes import PacketTypes
    from paho.mqtt.properties import Properties

# readings, units, readings
PERIOD = 24
NOISE = 0.1
DRIFT_AFTER = 300
DRAIN_S = 30.0


def make_reading(sensor: int, number: int, noise: random.Random) -> float:
    """Reading `number` of a sensor, from 0."""
    period = PERIOD / 2 if sensor % 10 == 9 and number >= DRIFT_AFTER else PERIOD
    return 20 + 5 * math.sin(2 * math.pi * (number + sensor) / period) + noise.gauss(0, NOISE)


def make_topic(topic_filter: str, name: str) -> str:
    """A topic that matches the filter, with the sensor's name for its wildcards."""
    return "/".join(name if level in ("+", "#") else level for level in topic_filter.split("/"))


class Fleet:
    """Publishes readings, and measures answers if `measures`."""

    def __init__(self, spec: SensorTopicSpec, num_sensors: int, seed: int = 0, *, measures: bool = False) -> None:
        self._spec, self._num_sensors = spec, num_sensors
        self._noise = random.Random(seed)
        self._publisher = f"fleet-{uuid.uuid4().hex[:12]}"  # a new process counts from 1, under a new name
        self._sent_s: dict[int, float] = {}
        self._latencies_ms: dict[int, float] = {}
        self.num_published = 0
        self._client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        self._client.max_queued_messages_set(0)
        # A sensor with a connection of its own would not wait for the acknowledgement of another's reading.
        self._client.on_socket_open = send_at_once
        if measures:
            self._client.on_message = self._measure
            self._client.on_connect = lambda client, *_: client.subscribe(f"{spec.answers}/#", qos=0)
        host, port = parse_address(spec)
        try:
            self._client.connect(host, port, KEEP_ALIVE_S)
        except OSError as error:
            raise ConfigError(
                "mqtt.broker", spec.broker, f"does not answer ({error})", "start a broker there"
            ) from None
        self._client.loop_start()

    def publish(self, number: int) -> None:
        """Publish message `number`, from 0: of one sensor after the other."""
        reading, sensor = divmod(number, self._num_sensors)
        properties = Properties(PacketTypes.PUBLISH)
        properties.UserProperty = [(PUBLISHER, self._publisher), (SEQUENCE, str(number + 1))]
        now_s = time.time()
        payload = encode_payload((make_reading(sensor, reading, self._noise),), now_s)
        self._sent_s[number + 1] = time.perf_counter()
        self._client.publish(make_topic(self._spec.topic, f"s{sensor:04d}"), payload, qos=1, properties=properties)
        self.num_published += 1

    def _measure(self, client: paho.Client, data: Any, packet: paho.MQTTMessage) -> None:
        arrived_s = time.perf_counter()
        content = json.loads(packet.payload)
        if content[PUBLISHER] == self._publisher:
            sequence = content[SEQUENCE]
            self._latencies_ms.setdefault(sequence, 1e3 * (arrived_s - self._sent_s[sequence]))

    @property
    def latencies_ms(self) -> list[float | None]:
        """One for each published message, in order; None where no answer has come."""
        return [self._latencies_ms.get(sequence) for sequence in range(1, self.num_published + 1)]

    def close(self) -> None:
        """Disconnect, after every reading has reached the broker."""
        deadline_s = time.monotonic() + DRAIN_S
        while self._client.want_write() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        self._client.disconnect()
        self._client.loop_stop()


def pace(rate_per_s: float, num_messages: int | None, stopped: threading.Event) -> Iterator[int]:
    """Numbers from 0, each at its time; a late one comes at once."""
    began_s, number = time.perf_counter(), 0
    while not stopped.is_set() and number != num_messages:
        wait_s = began_s + number / rate_per_s - time.perf_counter()
        if wait_s > 0 and stopped.wait(wait_s):
            return
        yield number
        number += 1


def main() -> None:
    """Publish until the number of messages, or the end of the standard input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broker", required=True)
    parser.add_argument("--topic", default=SensorTopicSpec().topic)
    parser.add_argument("--sensors", type=int, default=1000)
    parser.add_argument("--rate-hz", type=float, default=1.0)
    parser.add_argument("--messages", type=int, default=None)
    parser.add_argument("--answers", action="store_true")
    given = parser.parse_args()
    stopped = threading.Event()

    def wait_for_end() -> None:
        while os.read(0, 1 << 12):  # sys.stdin has a lock, at which the interpreter would fail as it ends
            pass
        stopped.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    spec = SensorTopicSpec(broker=given.broker, topic=given.topic)
    fleet = Fleet(spec, given.sensors, measures=given.answers)
    for number in pace(given.sensors * given.rate_hz, given.messages, stopped):
        fleet.publish(number)
    if given.answers:
        stopped.wait(3.0)
    fleet.close()
    print(json.dumps({"published": fleet.num_published, "latencies_ms": fleet.latencies_ms}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
