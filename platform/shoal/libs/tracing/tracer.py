"""A replica's traces: from the ingress through the queue and the batch to the forward.

    POST .../infer     the request, from arrival to answer; child of the caller's span (W3C traceparent)
      queue            waiting for a slot
      compute          the forward of its batch
    batch              a separate trace, with a link to each request in it: from the oldest request's arrival
      forward          to the end of the forward

A replica makes a Tracer when its spec names a destination. Without one, OpenTelemetry is not imported, and a request
costs a comparison. Called by the protocol applications (`start_request`) and by the served model (`record_batch`). A
span that cannot be exported is dropped without a wait; at most `MAX_WAITING_SPANS` wait.

    otlp://HOST:PORT, otlps://...    OTLP over HTTP, or HTTPS, at /v1/traces (needs the extra `trace`)
    file:FOLDER                      a line of JSON for each span, in FOLDER/REPLICA.jsonl
    ...?ratio=0.01                   of the requests whose header does not decide it; 1 by default
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError, InferenceError, format_install
from shoal.extend.serve import CLIENT_GONE, Disconnected, TraceDestination

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.sampling import Sampler
    from opentelemetry.trace import Span, SpanContext
    from opentelemetry.trace import Tracer as OpenTelemetryTracer

    from shoal.extend.serve import InferCall, Outputs, PendingBatch, Prediction

MAX_WAITING_SPANS = 8192
EXPORT_TIMEOUT_S = 3.0  # a stopping replica's wait for a collector that does not answer
EXPORT_EVERY_S = 2.0


class RequestTrace:
    """The span of one request; a context manager that ends it.

    submitted_ns:     when it entered a queue
    cancelled_status: the status of a cancelled request
    """

    __slots__ = ("_span", "_tracer", "cancelled_status", "context", "submitted_ns")

    def __init__(self, tracer: OpenTelemetryTracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self.submitted_ns = 0
        self.cancelled_status = CLIENT_GONE
        self.context: SpanContext = span.get_span_context()

    def record_prediction(self, prediction: Prediction[Outputs], num_rows: int) -> None:
        """Record a model's answer and its times."""
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        self._span.set_attributes({"shoal.version": prediction.version, "shoal.rows": num_rows})
        within = set_span_in_context(self._span, Context())
        begins_ns = self.submitted_ns
        for name, seconds in (("queue", prediction.queued_s), ("compute", prediction.computed_s)):
            ends_ns = begins_ns + int(seconds * 1e9)
            child = self._tracer.start_span(name, within, start_time=begins_ns)
            if name == "compute":
                child.set_attribute("shoal.batch.rows", prediction.batch_rows)
            child.end(ends_ns)
            begins_ns = ends_ns

    def __enter__(self) -> RequestTrace:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        status = 200
        if error is not None:
            # A request is cancelled when its client disconnects.
            is_answer = isinstance(error, Exception) and not isinstance(error, Disconnected)
            status = error.status if isinstance(error, InferenceError) else 500 if is_answer else self.cancelled_status
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.end()


class Tracer:
    """The tracer of one replica. Raises ConfigError when the destination's package is not installed."""

    def __init__(self, destination: str, endpoint: str, replica: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        where = TraceDestination.parse(destination)
        resource = Resource({"service.name": f"shoal.{endpoint}", "service.instance.id": replica})
        self._closing = ExitStack()
        spans = BatchSpanProcessor(
            self._closing.enter_context(_open_exporter(where, replica)),
            max_queue_size=MAX_WAITING_SPANS,
            schedule_delay_millis=EXPORT_EVERY_S * 1e3,
            export_timeout_millis=EXPORT_TIMEOUT_S * 1e3,
        )
        self._closing.callback(spans.shutdown)

        def tracer(sampler: Sampler) -> OpenTelemetryTracer:
            provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
            provider.add_span_processor(spans)
            return provider.get_tracer("shoal.serve")

        self._ratio = where.ratio
        self._requests = tracer(ParentBased(ALWAYS_ON))
        self._batches = tracer(ALWAYS_ON)  # of batches with a traced request
        self._extract = TraceContextTextMapPropagator().extract

    def start_request(self, name: str, model: str, traceparent: str = "", tracestate: str = "") -> RequestTrace | None:
        """Start the span of a new request; None when it is not traced."""
        if not traceparent and random.random() >= self._ratio:
            return None
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        carrier = {"traceparent": traceparent, "tracestate": tracestate} if traceparent else {}
        within = self._extract(carrier, Context())
        if traceparent and not within and random.random() >= self._ratio:  # an invalid header counts as none
            return None
        span = self._requests.start_span(name, within, SpanKind.SERVER, {"shoal.model": model})
        return RequestTrace(self._requests, span) if span.is_recording() else None

    def record_batch(self, model: str, batch: PendingBatch[Any, InferCall, Outputs]) -> None:
        """Record a batch that was just computed, when any of its requests is traced."""
        from opentelemetry.context import Context
        from opentelemetry.trace import Link, set_span_in_context

        links = [Link(trace.context) for each in batch.requests if (trace := each.request.trace) is not None]
        if not links:
            return
        attributes: dict[str, str | int] = {
            "shoal.model": model,
            "shoal.version": batch.version,
            "shoal.batch.rows": batch.rows,
            "shoal.batch.requests": len(batch.requests),
            "shoal.batch.failed": batch.failed,
        }
        ends_ns = time.time_ns()
        starts_ns = ends_ns - int(batch.computed_s * 1e9)
        gathers_ns = starts_ns - int((batch.started_s - min(each.arrived_s for each in batch.requests)) * 1e9)
        span = self._batches.start_span("batch", Context(), links=links, attributes=attributes, start_time=gathers_ns)
        forward = self._batches.start_span("forward", set_span_in_context(span, Context()), start_time=starts_ns)
        forward.end(ends_ns)
        span.end(ends_ns)

    def close(self) -> None:
        """Export the waiting spans, for up to `EXPORT_TIMEOUT_S`. Idempotent."""
        self._closing.close()


@contextmanager
def _open_exporter(where: TraceDestination, replica: str) -> Iterator[SpanExporter]:
    if where.kind == "file":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        folder = Path(where.target)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (folder / f"{replica}.jsonl").open("a") as file:
            yield ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError("trace", where.target, f"{error}", format_install("trace")) from None
    yield OTLPSpanExporter(where.target, timeout=int(EXPORT_TIMEOUT_S))
