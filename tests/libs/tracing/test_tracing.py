"""Traces: what they say of a request and of its batch, where they go, and that none cost nothing."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from answering import answering
from shoal.errors import ConfigError, InferenceError
from shoal.libs.tracing.tracer import Tracer
from shoal.serve.messages.infer_call import InferCall
from shoal.serve.messages.inference import Prediction
from shoal.serve.spec.endpoint import TraceDestination

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = CALLER[:-1] + "0"
PREDICTION = Prediction({}, version=3, queued_s=0.25, computed_s=0.5, batch_rows=8)
RATIOS_THAT_ARE_NONE = ("ratio=2", "ratio=a", "y=1", "y")


def batch_of(*traces: Any) -> Any:
    """Of eight rows, computed by version 3, one request for each trace."""
    requests = [SimpleNamespace(request=InferCall({}, 1, trace=trace), arrived_s=1.0) for trace in traces]
    return SimpleNamespace(requests=requests, rows=8, failed=0, version=3, started_s=1.25, computed_s=0.5)


def seconds(span: dict[str, Any]) -> float:
    def at(text: str) -> float:
        return np.datetime64(text.removesuffix("Z")).astype("datetime64[us]").astype(float) / 1e6

    return at(span["end_time"]) - at(span["start_time"])


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[tuple[Callable[..., Tracer], Callable[[], list[dict[str, Any]]]]]:
    """Makes tracers, and closes them to see what they wrote."""
    tracers: list[Tracer] = []

    def make(query: str = "") -> Tracer:
        tracers.append(Tracer(f"file:{tmp_path}/traces{query}", "digits", "replica-1"))
        return tracers[-1]

    def spans() -> list[dict[str, Any]]:
        for tracer in tracers:
            tracer.close()
        return [json.loads(line) for line in (tmp_path / "traces" / "replica-1.jsonl").read_text().splitlines()]

    yield make, spans
    for tracer in tracers:
        tracer.close()


def test_a_request_is_a_child_of_its_callers_span_and_says_where_its_time_went(traced: Any) -> None:
    make, spans = traced
    with make().start_request("POST infer", "m", CALLER) as trace:
        trace.submitted_ns = time.time_ns()
        trace.record_prediction(PREDICTION, num_rows=2)
    found = {span["name"]: span for span in spans()}
    assert set(found) == {"POST infer", "queue", "compute"}
    request = found["POST infer"]
    assert request["context"]["trace_id"] == "0x0af7651916cd43dd8448eb211c80319c"
    assert request["parent_id"] == "0xb7ad6b7169203331"
    assert request["kind"] == "SpanKind.SERVER"
    assert request["attributes"] == {
        "shoal.model": "m", "shoal.version": 3, "shoal.rows": 2, "http.response.status_code": 200
    }  # fmt: skip
    assert request["resource"]["attributes"]["service.name"] == "shoal.digits"
    for name, wanted_s in (("queue", 0.25), ("compute", 0.5)):
        assert found[name]["parent_id"] == request["context"]["span_id"]
        assert seconds(found[name]) == pytest.approx(wanted_s, abs=1e-3)
    assert found["queue"]["start_time"] < found["queue"]["end_time"] == found["compute"]["start_time"]
    assert found["compute"]["attributes"] == {"shoal.batch.rows": 8}


def test_a_batch_is_linked_to_the_requests_in_it(traced: Any) -> None:
    make, spans = traced
    tracer = make()
    traces = [None]  # one that is not traced
    for _ in range(2):
        with tracer.start_request("POST infer", "m") as trace:
            traces.append(trace)
    tracer.record_batch("m", batch_of(*traces))
    by_name: dict[str, list[dict[str, Any]]] = {}
    for span in spans():
        by_name.setdefault(span["name"], []).append(span)
    (batch,), (forward,) = by_name["batch"], by_name["forward"]
    linked = {link["context"]["span_id"] for link in batch["links"]}
    assert linked == {span["context"]["span_id"] for span in by_name["POST infer"]}
    assert batch["parent_id"] is None
    assert batch["attributes"]["shoal.batch.requests"] == 3
    assert forward["parent_id"] == batch["context"]["span_id"]
    assert seconds(batch) == pytest.approx(0.75, abs=1e-3)
    assert seconds(forward) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("error", "status", "is_error"),
    [
        (InferenceError(429, "full"), 429, False),
        (InferenceError(503, "no weights"), 503, True),
        (RuntimeError("oops"), 500, True),
        (asyncio.CancelledError(), 499, False),
    ],
)
def test_a_request_that_failed(traced: Any, error: BaseException, status: int, is_error: bool) -> None:
    make, spans = traced
    with pytest.raises(type(error)), make().start_request("POST infer", "m"):
        raise error
    (span,) = spans()
    assert span["attributes"]["http.response.status_code"] == status
    assert (span["status"]["status_code"] == "ERROR") == is_error


def test_a_request_that_was_cancelled_because_it_is_late(traced: Any) -> None:
    make, spans = traced
    trace = make().start_request("POST infer", "m")
    trace.cancelled_status = 504
    with pytest.raises(asyncio.CancelledError), trace:
        raise asyncio.CancelledError
    (span,) = spans()
    assert span["attributes"]["http.response.status_code"] == 504
    assert span["status"]["status_code"] == "ERROR"


def test_who_says_that_it_is_not_traced_is_not(traced: Any) -> None:
    make, spans = traced
    tracer = make()
    assert tracer.start_request("POST infer", "m", UNSAMPLED) is None
    tracer.record_batch("m", batch_of(None))
    assert spans() == []


def test_the_ratio_is_of_those_that_do_not_say(traced: Any) -> None:
    make, spans = traced
    tracer = make("?ratio=0")
    assert tracer.start_request("POST infer", "m") is None
    with tracer.start_request("POST infer", "m", CALLER) as trace:
        tracer.record_batch("m", batch_of(trace))
    assert {span["name"] for span in spans()} == {"POST infer", "batch", "forward"}


@pytest.mark.parametrize("traceparent", ["nonsense", "00-0-0-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\xff"])
def test_a_traceparent_that_is_none_says_nothing(traced: Any, traceparent: str) -> None:
    make, spans = traced
    assert make("?ratio=0").start_request("POST infer", "m", traceparent) is None
    with make().start_request("POST infer", "m", traceparent):
        pass
    assert spans()[0]["parent_id"] is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("otlp://localhost:4318", TraceDestination("otlp", "http://localhost:4318/v1/traces")),
        ("otlps://h/prefix/?ratio=0.5", TraceDestination("otlp", "https://h/prefix/v1/traces", 0.5)),
        ("file:/tmp/traces", TraceDestination("file", "/tmp/traces")),
        ("file:traces?ratio=0", TraceDestination("file", "traces", 0.0)),
    ],
)
def test_destinations(text: str, expected: TraceDestination) -> None:
    assert TraceDestination.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["true", "otlp:", "otlp://", "http://h", "file:", "", *(f"file:x?{each}" for each in RATIOS_THAT_ARE_NONE)]
)
def test_what_is_no_destination(text: str) -> None:
    with pytest.raises(ConfigError, match="otlp://HOST:PORT"):
        TraceDestination.parse(text)


def test_spans_go_to_a_collector_over_otlp() -> None:
    with answering({"/v1/traces": b""}.get) as server:
        tracer = Tracer(f"otlp://127.0.0.1:{server.server_port}", "digits", "replica-1")
        trace = tracer.start_request("POST infer", "m", CALLER)
        assert trace is not None
        with trace:
            pass
        tracer.close()
        tracer.close()
    (body,) = server.posted
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    (span,) = resource.scope_spans[0].spans
    assert span.name == "POST infer"
    assert span.trace_id.hex() == CALLER.split("-")[1]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'CHECKOUT\[trace\]'"):
        Tracer("otlp://127.0.0.1:1", "digits", "replica-1")
