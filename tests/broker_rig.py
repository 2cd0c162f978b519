"""Clients of a broker, which publish what a test needs."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties


@contextmanager
def connected(address: str) -> Iterator[paho.Client]:
    host, port = address.split(":")
    client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    client.connect(host, int(port))
    client.loop_start()
    yield client
    client.disconnect()
    client.loop_stop()


def publish_all(
    address: str, packets: Iterable[tuple[str, bytes, int | None]], qos: int = 1, retain: bool = False
) -> None:
    """Publish (topic, payload, sequence), and wait until the broker has them."""
    with connected(address) as client:
        for topic, payload, sequence in packets:
            properties = Properties(PacketTypes.PUBLISH)
            if sequence is not None:
                properties.UserProperty = [("publisher", "p"), ("sequence", str(sequence))]
            client.publish(topic, payload, qos, retain, properties=properties).wait_for_publish(600)
