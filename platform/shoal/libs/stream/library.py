"""The source of messages that this library has, and what the report shows of its runs."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "stream",
    extensions={
        "shoal.sources": {
            "MqttSource": "shoal.libs.stream.mqtt_source:MqttSource",
            "MqttSpec": "shoal.libs.stream.spec:MqttSpec",
        },
        "shoal.panels": {"stream": "shoal.libs.stream.report:PANELS"},
    },
)
