"""What asks an endpoint: `Client` and `AsyncClient`, NumPy in and out. Needs httpx: `pip install 'shoal[client]'`."""

from shoal.client.client import AsyncClient, Client
from shoal.client.status import EndpointStatus, ModelStatus, VersionStatus
from shoal.client.tensors import Answer

__all__ = ["Answer", "AsyncClient", "Client", "EndpointStatus", "ModelStatus", "VersionStatus"]
