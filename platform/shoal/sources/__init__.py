"""Where messages come from: the topic of a broker, and the seam for others. As training data, see docs/data.md.

Names that need an extra are imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.sources.mqtt import MqttSource
    from shoal.sources.mqtt_spec import MqttSpec
    from shoal.sources.source import Delivery, MalformedPayload, Sample, StreamSource, StreamState

__all__ = ["Delivery", "MalformedPayload", "MqttSource", "MqttSpec", "Sample", "StreamSource", "StreamState"]

_HOMES = {
    **dict.fromkeys(("Delivery", "MalformedPayload", "Sample", "StreamSource", "StreamState"), "shoal.sources.source"),
    "MqttSource": "shoal.sources.mqtt",
    "MqttSpec": "shoal.sources.mqtt_spec",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
