"""A replica's counters and gauges in Ray's own exporter, for scrapes of a cluster's nodes instead of an endpoint.

Called by the Ray shell with a report every few seconds. The names are those of `prometheus`; Ray adds the prefix `ray_`
and its own labels. Histograms stay with the endpoint's GET /metrics: Ray takes values one by one.
"""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from shoal.serve.messages.replica_report import ReplicaReport
from shoal.serve.protocol.prometheus import METRICS, series


class RayMetrics:
    """The metrics of one replica."""

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        for name, metric in METRICS.items():
            made = (metric.help, (*metric.labels, "replica"))
            if metric.kind == "counter":
                self._counters[name] = Counter(name, *made)
            elif metric.kind == "gauge":
                self._gauges[name] = Gauge(name, *made)
        self._published: dict[tuple[str, tuple[str, ...]], float] = {}

    def publish(self, report: ReplicaReport) -> None:
        """Publish the counts since the last report, and the gauges."""
        for name, labels, value in series(report):
            if not isinstance(value, (int, float)):
                continue
            tags = {label: labels.get(label, "") for label in METRICS[name].labels} | {"replica": report.replica}
            if name in self._gauges:
                self._gauges[name].set(value, tags)
                continue
            key = name, tuple(tags.values())
            told = self._published.get(key, 0.0)
            if (more := value - told if value >= told else value) > 0.0:  # below it: the model was deployed again
                self._counters[name].inc(more, tags)
                self._published[key] = value
