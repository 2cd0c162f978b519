"""A replica's counters and gauges in Ray's own exporter, for those who scrape the nodes of a cluster and no endpoint.

Called by the Ray shell with a report every few seconds. The names are those of `prometheus`; Ray puts `ray_` before
them, and its own labels beside ours. Histograms stay with the endpoint's GET /metrics: Ray takes values one by one.
"""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from shoal.serve.messages.replica_report import ReplicaReport
from shoal.serve.protocol.prometheus import METRICS, series


class RayMetrics:
    """Of one replica."""

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
        """What was counted since the last report, and how things are."""
        for name, labels, value in series(report):
            if not isinstance(value, (int, float)):
                continue
            tags = {label: labels.get(label, "") for label in METRICS[name].labels} | {"replica": report.replica}
            if name in self._gauges:
                self._gauges[name].set(value, tags)
                continue
            key = name, tuple(tags.values())
            told = self._published.get(key, 0.0)
            if (more := value - told if value >= told else value) > 0.0:  # below it: of a model that was deployed anew
                self._counters[name].inc(more, tags)
                self._published[key] = value
