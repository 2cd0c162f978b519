"""Sensors' messages of an MQTT topic, and forecasts back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from shoal.libs.stream.messages import MessageParser
from shoal.libs.stream.spec import SensorTopicSpec
from shoal.libs.stream.trainer import SensorForecast
from shoal.sources.mqtt import PUBLISHER, SEQUENCE, MqttSource


class SensorSource(MqttSource):
    """width: values of a message; 0: any number. report: as of MqttSource"""

    def __init__(
        self, spec: SensorTopicSpec, width: int, report: Callable[..., None] = lambda kind, **details: None
    ) -> None:
        super().__init__(spec, MessageParser(width, spec.topic, spec.sensor_field), report)
        self._answers = spec.answers

    def publish_forecasts(self, forecasts: Sequence[SensorForecast]) -> None:
        """One that comes late is of no use: each is sent at most once."""
        if not self._answers:
            return
        for forecast in forecasts:
            message = forecast.message
            content = {
                "forecast": forecast.prediction,
                "time": message.time_s,
                PUBLISHER: message.publisher,
                SEQUENCE: message.sequence,
                "updates": forecast.num_updates,
            }
            self.publish(f"{self._answers}/{message.sensor}", msgspec.json.encode(content))
