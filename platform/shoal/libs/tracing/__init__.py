"""Traces of an endpoint's requests, as OpenTelemetry records them."""
