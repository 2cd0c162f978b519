"""The destinations of traces that this library adds to specs of endpoints."""

from shoal.plugins.library import Library

_TRACER = "shoal.libs.tracing.tracer:Tracer"
LIBRARY = Library("tracing", extensions={"shoal.tracers": {"otlp": _TRACER, "file": _TRACER}})
