"""Requests to an endpoint or a gateway over HTTP, for libraries: a transport, and what is repeated."""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.client.address import normalize_address
    from shoal.client.payload import encode_inputs
    from shoal.client.requests import build_infer_request, build_text_request
    from shoal.client.retry import EndpointRequest, RetryPolicy, request_with_retries
    from shoal.client.transport import AsyncTransport

__getattr__ = load_on_demand(__name__)
