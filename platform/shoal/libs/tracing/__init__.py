"""Traces of an endpoint's requests, as OpenTelemetry records them."""

from shoal.plugins.library import Library

_TRACER = "shoal.libs.tracing.tracer:Tracer"
LIBRARY = Library("tracing", extensions={"shoal.tracers": {"otlp": _TRACER, "file": _TRACER}})
