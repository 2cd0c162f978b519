"""Learning from messages as they come, and answering them: sources, the online trainer, group commit."""

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
