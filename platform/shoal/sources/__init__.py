"""Where messages come from: the seam for topics of brokers and for logs. As training data, see docs/data/messages.md.

Libraries add sources, as `MqttSource`. Names are imported at their first use.
"""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.sources.source import Delivery, MalformedPayload, Sample, StreamSource, StreamState

__getattr__ = load_on_demand(__name__, "shoal.sources")
