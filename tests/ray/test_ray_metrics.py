"""What Ray's exporter is told of a replica; its metric classes are replaced, so that there need be no cluster."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.serve.protocol.prometheus import METRICS
from unit.serve.test_prometheus import report, worked

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class FakeMetric:
    """Adds or sets, and refuses as Ray's do what does not fit."""

    values: Values

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert description
        self.name, self.tag_keys = name, tag_keys

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0
        key = self._key(tags)
        self.values[key] = self.values.get(key, 0.0) + value

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values[self._key(tags)] = value

    def _key(self, tags: dict[str, str]) -> Any:
        assert set(tags) == set(self.tag_keys)
        return self.name, tuple(sorted(tags.items()))


def test_counters_grow_by_what_is_new_and_gauges_are_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.serve.on_ray import replica_worker as ray_metrics

    FakeMetric.values = values = {}
    monkeypatch.setattr(ray_metrics, "Counter", FakeMetric)
    monkeypatch.setattr(ray_metrics, "Gauge", FakeMetric)
    statistics, metrics = worked(), ray_metrics.RayMetrics()

    def value(name: str, **labels: str) -> float:
        return values[name, tuple(sorted({**labels, "replica": "a"}.items()))]

    for _ in range(2):
        metrics.publish(report(statistics))
        assert value("nv_inference_count", model="m", version="1") == 4
        assert value("shoal_requests_total", model="m", version="", status="429") == 2
        assert value("shoal_queued_rows", model="m") == 7
    statistics.count_request(1, 200, 0.01, rows=3)
    metrics.publish(report(statistics))
    assert value("nv_inference_count", model="m", version="1") == 7
    assert {name for name, _ in values} == {name for name, metric in METRICS.items() if metric.kind != "histogram"}


def test_rays_own_classes_take_every_metric() -> None:
    from shoal.serve.on_ray.replica_worker import RayMetrics

    RayMetrics()
