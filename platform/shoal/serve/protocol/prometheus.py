"""The metrics of an endpoint in Prometheus' format: Triton's names for Triton's counters, `shoal_` for the rest.

Called for GET /metrics, with the newest report of every replica: a scrape of any replica sees the full endpoint. Every
series has the label `replica`, so that its counters only rise: a replaced replica's series end and others begin. A live
model has one series, `version="live"`, because a series for each of twenty versions a second would be useless. The
series of a registered model's version ends when it leaves the statistics: its counts were scraped under its number and
would count twice in another series.
Pure: counts nothing and calls no process. What is exported is declared where it is counted (`serve.messages`).
`prometheus_client` is not used: it takes five times as long, and writes Triton's counters, whose names do not end with
_total, under a type line with another name (decision 009).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from shoal.serve.messages.counts import Histogram, Metric, ModelCounts, VersionCounts, list_declared
from shoal.serve.messages.inference import Caller
from shoal.serve.messages.replica_report import ModelReport, ReplicaReport, Residency

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
Labels = Mapping[str, str]
Series = tuple[str, Labels, float | Histogram]

_MODEL = ("model",)
_OWNERS: dict[type, tuple[str, ...]] = {
    ReplicaReport: (),
    ModelReport: _MODEL,
    Residency: _MODEL,
    ModelCounts: _MODEL,
    VersionCounts: ("model", "version"),
}
# By name; the labels of each in addition to `replica`. A label with the value "" is left out.
METRICS = {
    metric.name: replace(metric, labels=(*labels, *metric.labels))
    for owner, labels in _OWNERS.items()
    for _, metric in list_declared(owner)
}


def render(reports: Iterable[ReplicaReport], caller: Caller | None = None) -> bytes:
    """Render the text of a scrape, of type CONTENT_TYPE. A caller with a key for some models sees only those, and no
    other callers."""
    reports = list(reports)
    metrics = list_metrics(reports)
    families: dict[str, list[str]] = {name: [] for name in metrics}
    for report in reports:
        for name, labels, value in series(report):
            if caller is None or labels.get("key") == caller.name or caller.can_see(labels.get("model", "")):
                families[name].extend(_lines(name, {**labels, "replica": report.replica}, value))
    lines: list[str] = []
    for name, metric in metrics.items():
        if families[name]:
            lines += (f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}", *families[name])
    return ("\n".join(lines) + "\n").encode()


def list_metrics(reports: Iterable[ReplicaReport]) -> dict[str, Metric]:
    """The families of these reports by name, with those of libraries."""
    return METRICS | {
        name: Metric(name, each.help, each.kind, _MODEL)
        for report in reports
        for counts in report.counts.values()
        for name, each in counts.others.items()
    }


def series(report: ReplicaReport) -> Iterator[Series]:
    """(metric, labels without `replica`, value) of one replica."""
    yield from _read(report, {})
    for name, model in report.models.items():
        labels, counts = {"model": name}, model.counts
        for owner in (model, model.residency, counts):
            if owner is not None:
                yield from _read(owner, labels)
        if counts is not None:
            for metric, other in counts.others.items():
                yield metric, labels, other.value
            versions = {"live": counts.sum_versions()} if counts.live else counts.versions
            for version, each in versions.items():
                yield from _read(each, {**labels, "version": str(version)})


def _read(owner: Any, labels: Labels) -> Iterator[Series]:
    for field, metric in list_declared(owner.__class__):
        if metric.when(owner):
            yield from _divide(metric.name, metric.labels, labels, metric.read(getattr(owner, field)))


def _divide(name: str, keys: tuple[str, ...], labels: Labels, value: Any) -> Iterator[Series]:
    """The series of a count that has such keys."""
    if not keys:
        yield name, labels, value
        return
    for key, part in value.items():
        yield from _divide(name, keys[1:], {**labels, keys[0]: str(key).translate(_ESCAPES)}, part)


def _lines(name: str, labels: Labels, value: float | Histogram) -> Iterator[str]:
    if isinstance(value, (int, float)):
        yield f"{name}{{{_written(labels)}}} {value:.17g}"
        return
    count = 0
    for bound, in_bucket in zip([*map("{:g}".format, value.bounds), "+Inf"], value.counts, strict=True):
        count += in_bucket
        yield f'{name}_bucket{{{_written(labels)},le="{bound}"}} {count}'
    yield f"{name}_sum{{{_written(labels)}}} {value.sum:.17g}"
    yield f"{name}_count{{{_written(labels)}}} {count}"


def _written(labels: Labels) -> str:
    return ",".join(f'{name}="{value}"' for name, value in labels.items() if value)
