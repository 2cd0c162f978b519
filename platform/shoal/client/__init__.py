"""The clients of an endpoint: `Client` and `AsyncClient`, NumPy in and out, and the errors that they raise.

Needs httpx2, which the extra `client` installs.
"""

from shoal.client.client import AsyncClient, Client
from shoal.client.endpoint_status import EndpointStatus, ModelStatus, VersionStatus
from shoal.client.payload import Answer
from shoal.client.streamed_text import StreamedText
from shoal.errors import ConfigError, ConnectionLost, InferenceError

__all__ = [
    "Answer",
    "AsyncClient",
    "Client",
    "ConfigError",
    "ConnectionLost",
    "EndpointStatus",
    "InferenceError",
    "ModelStatus",
    "StreamedText",
    "VersionStatus",
]
