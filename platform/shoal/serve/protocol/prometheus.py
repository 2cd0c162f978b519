"""The metrics of an endpoint in Prometheus' format: Triton's names for Triton's counters, `shoal_` for the rest.

Called for GET /metrics, with the newest report of every replica: a scrape of any replica sees the full endpoint. Every
series has the label `replica`, so that its counters only rise: a replaced replica's series end and others begin. A live
model has one series, `version="live"`, because a series for each of twenty versions a second would be useless. The
series of a registered model's version ends when it leaves the statistics: its counts were scraped under its number and
would count twice in another series.
Pure: counts nothing and calls no process. `prometheus_client` is not used: it takes five times as long, and writes
Triton's counters, whose names do not end with _total, under a type line with another name (decision 009).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from shoal.serve.messages.inference import Caller
from shoal.serve.messages.metrics_snapshot import (
    HistogramSnapshot,
    LibraryMetric,
    ModelSnapshot,
    VersionSnapshot,
    sum_versions,
)
from shoal.serve.messages.replica_report import ReplicaReport

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
Labels = Mapping[str, str]
Series = tuple[str, Labels, float | HistogramSnapshot]


@dataclass(frozen=True)
class Metric:
    """A family of series. `labels` in addition to `replica`; a label with the value "" is left out."""

    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


_MODEL = ("model",)
_VERSION = ("model", "version")
METRICS: dict[str, Metric] = {
    "nv_inference_request_success": Metric("counter", _VERSION, "Requests that were answered"),
    "nv_inference_request_failure": Metric(
        "counter", ("model", "version", "reason"), "Requests that failed, by Triton's reason"
    ),
    "nv_inference_count": Metric("counter", _VERSION, "Rows that were answered"),
    "nv_inference_exec_count": Metric("counter", _VERSION, "Batches that were computed"),
    "nv_inference_request_duration_us": Metric(
        "counter", _VERSION, "Time of answered requests, from arrival to answer"
    ),
    "nv_inference_queue_duration_us": Metric("counter", _VERSION, "Time that answered requests waited for a slot"),
    "nv_inference_compute_infer_duration_us": Metric(
        "counter", _VERSION, "Time of the batches that answered requests were in"
    ),
    "nv_inference_pending_request_count": Metric("gauge", _MODEL, "Requests that wait for a slot"),
    "shoal_requests_total": Metric(
        "counter", ("model", "version", "status"), "Requests by HTTP status; no version: refused before one was chosen"
    ),
    "shoal_request_duration_seconds": Metric("histogram", _VERSION, "Answered requests, from arrival to answer"),
    "shoal_queue_duration_seconds": Metric("histogram", _MODEL, "Answered requests, while they waited for a slot"),
    "shoal_batch_duration_seconds": Metric("histogram", _MODEL, "Batches, while they were computed"),
    "shoal_batch_rows": Metric("histogram", _MODEL, "Rows of a batch"),
    "shoal_queued_rows": Metric("gauge", _MODEL, "Rows that wait for a slot"),
    "shoal_serving_version": Metric(
        "gauge", ("model", "track"), "The version that answers, by track (stable, candidate); 0 for none"
    ),
    "shoal_candidate_percent": Metric("gauge", _MODEL, "The candidate's part of the requests"),
    "shoal_swaps_total": Metric("counter", _MODEL, "Changes of the stable version"),
    "shoal_shadow_compared_total": Metric(
        "counter", _VERSION, "Requests that this version computed in addition to the one that answered"
    ),
    "shoal_shadow_disagreed_total": Metric("counter", _VERSION, "Shadowed requests whose outputs differed"),
    "shoal_shadow_failed_total": Metric("counter", _VERSION, "Shadowed requests that this version failed at"),
    "shoal_column_values_total": Metric(
        "counter",
        ("model", "version", "column", "what"),
        "Values of a table's column that training has not seen: gap, unknown (refused), beyond the range",
    ),
    "shoal_model_resident_bytes": Metric("gauge", _MODEL, "Bytes of the loaded versions of a model on demand; 0: cold"),
    "shoal_model_loads_total": Metric("counter", _MODEL, "Loads of a model on demand"),
    "shoal_model_load_seconds_total": Metric("counter", _MODEL, "Time that these loads took"),
    "shoal_model_evictions_total": Metric("counter", _MODEL, "How often it made way for others"),
    "shoal_model_waiting_requests": Metric("gauge", _MODEL, "Requests that wait for its load"),
    "shoal_model_waited_total": Metric("counter", _MODEL, "Requests that waited for its load"),
    "shoal_model_forwarded_total": Metric("counter", _MODEL, "Requests for it that another replica answered"),
    "shoal_caller_requests_total": Metric(
        "counter", ("key", "result"), "Requests by the name of the key, and their outcomes"
    ),
    "shoal_caller_tokens_total": Metric(
        "counter", ("key", "kind"), "Tokens of texts by the name of the key: input, output"
    ),
    "shoal_http_answers_total": Metric("counter", ("status",), "All answers over HTTP, also without a model"),
    "shoal_replica_ready": Metric("gauge", (), "Whether the replica has every model ready"),
    "shoal_certificate_expires_timestamp_seconds": Metric(
        "gauge", (), "When the endpoint's certificate expires, in seconds since the epoch; no series without one"
    ),
}

# Triton has four reasons: rejected, cancelled, failed in the model, and other.
_REASONS = {"429": "REJECTED", "503": "REJECTED", "504": "REJECTED", "499": "CANCELED", "500": "BACKEND"}


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
        name: Metric(each["kind"], _MODEL, each["help"])
        for report in reports
        for model in report.models.values()
        for name, each in _get_others(model.counts).items()
    }


def series(report: ReplicaReport) -> Iterator[Series]:
    """(metric, labels without `replica`, value) of one replica."""
    yield "shoal_replica_ready", {}, float(report.ready)
    if report.certificate_expires_at:
        yield "shoal_certificate_expires_timestamp_seconds", {}, report.certificate_expires_at
    for key, results in report.callers.items():
        for result, count in results.items():
            yield "shoal_caller_requests_total", {"key": key, "result": result}, count
    for key, kinds in report.tokens.items():
        for kind, count in kinds.items():
            yield "shoal_caller_tokens_total", {"key": key, "kind": kind}, count
    for status, count in report.statuses.items():
        yield "shoal_http_answers_total", {"status": status}, count
    for name, model in report.models.items():
        yield "shoal_queued_rows", {"model": name}, model.queued_rows
        if model.counts is not None:
            yield from _model({"model": name}, model.counts)
        if (residency := model.residency) is not None:
            yield "shoal_model_resident_bytes", {"model": name}, residency.resident_bytes
            yield "shoal_model_loads_total", {"model": name}, residency.loads
            yield "shoal_model_load_seconds_total", {"model": name}, residency.total_load_s
            yield "shoal_model_evictions_total", {"model": name}, residency.evictions
            yield "shoal_model_waiting_requests", {"model": name}, residency.waiting
            yield "shoal_model_waited_total", {"model": name}, residency.waited
            yield "shoal_model_forwarded_total", {"model": name}, residency.forwarded


def _model(labels: Labels, counts: ModelSnapshot) -> Iterator[Series]:
    serving = counts["serving"]
    yield "nv_inference_pending_request_count", labels, counts["pending"]
    yield "shoal_serving_version", {**labels, "track": "stable"}, serving["stable"]
    yield "shoal_serving_version", {**labels, "track": "candidate"}, serving["candidate"]
    yield "shoal_candidate_percent", labels, serving["percent"]
    yield "shoal_swaps_total", labels, counts["swaps"]
    yield "shoal_queue_duration_seconds", labels, counts["queue_s"]
    yield "shoal_batch_duration_seconds", labels, counts["compute_s"]
    yield "shoal_batch_rows", labels, counts["batch_rows"]
    for name, other in _get_others(counts).items():
        yield name, labels, other["value"]
    yield from _statuses({**labels, "version": ""}, counts["refused"])
    versions = {"live": sum_versions(counts)} if counts["live"] else counts["versions"]
    for version, each in versions.items():
        yield from _version({**labels, "version": version}, each)


def _get_others(counts: ModelSnapshot | None) -> Mapping[str, LibraryMetric]:
    return {} if counts is None else counts.get("others", {})


def _version(labels: Labels, counts: VersionSnapshot) -> Iterator[Series]:
    stats = counts["inference_stats"]
    yield "nv_inference_request_success", labels, stats["success"]["count"]
    yield "nv_inference_count", labels, counts["inference_count"]
    yield "nv_inference_exec_count", labels, counts["execution_count"]
    yield "nv_inference_request_duration_us", labels, stats["success"]["ns"] // 1000
    yield "nv_inference_queue_duration_us", labels, stats["queue"]["ns"] // 1000
    yield "nv_inference_compute_infer_duration_us", labels, stats["compute_infer"]["ns"] // 1000
    yield from _statuses(labels, counts["statuses"])
    yield "shoal_request_duration_seconds", labels, counts["request_s"]
    for column, sorts in counts["columns"].items():
        for what, count in sorts.items():
            yield "shoal_column_values_total", {**labels, "column": column.translate(_ESCAPES), "what": what}, count
    if counts["compared"] or counts["shadow_failed"]:
        yield "shoal_shadow_compared_total", labels, counts["compared"]
        yield "shoal_shadow_disagreed_total", labels, counts["disagreed"]
        yield "shoal_shadow_failed_total", labels, counts["shadow_failed"]


def _statuses(labels: Labels, statuses: Mapping[str, int]) -> Iterator[Series]:
    failures: dict[str, int] = {}
    for status, count in statuses.items():
        yield "shoal_requests_total", {**labels, "status": status}, count
        if status != "200":
            reason = _REASONS.get(status, "OTHER")
            failures[reason] = failures.get(reason, 0) + count
    for reason, count in failures.items():
        yield "nv_inference_request_failure", {**labels, "reason": reason}, count


def _lines(name: str, labels: Labels, value: float | HistogramSnapshot) -> Iterator[str]:
    if isinstance(value, (int, float)):
        yield f"{name}{{{_written(labels)}}} {value:.17g}"
        return
    count = 0
    for bound, in_bucket in zip([*map("{:g}".format, value["bounds"]), "+Inf"], value["counts"], strict=True):
        count += in_bucket
        yield f'{name}_bucket{{{_written(labels)},le="{bound}"}} {count}'
    yield f"{name}_sum{{{_written(labels)}}} {value['sum']:.17g}"
    yield f"{name}_count{{{_written(labels)}}} {count}"


def _written(labels: Labels) -> str:
    return ",".join(f'{name}="{value}"' for name, value in labels.items() if value)
