"""Finds the endpoints of this machine, and their token: in the run record, and the cards of those without a run.

Called by the command line and by programs that name an endpoint instead of its address. Only reads; calls endpoints
where several are up, and a model says which is meant.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from shoal.client.address import normalize_address, parse_host
from shoal.errors import ConnectionLost, InferenceError, RunError
from shoal.home import home, read_existing_token
from shoal.network_address import is_loopback
from shoal.runs import list_running
from shoal.runs.run_status import is_alive

if TYPE_CHECKING:
    from shoal.client.client import Client
    from shoal.client.endpoint_status import EndpointStatus

INFERENCE_KIND = "inference"  # the kind of an endpoint in the record; gateways have another
GRPC_KIND = "grpc"  # the kind of its second address, host:port
STATUS_TIMEOUT_S = 5.0  # of one endpoint

CARD_SUFFIX = ".address"


class EndpointCard(msgspec.Struct, frozen=True):
    """A detached endpoint, as its controller writes it into a file: the process `pid` of `host`, while it is up."""

    name: str
    url: str
    pid: int
    host: str


@dataclass(frozen=True)
class FoundEndpoint:
    """A ready endpoint. `run_id` is the run that serves it; "" for one given by its address, or detached."""

    name: str
    url: str
    run_id: str = ""
    is_detached: bool = False

    def connect(self, token: str = "", **options: Any) -> Client:
        """A client for it, with a token or this machine's; the options are a client's."""
        from shoal.client.client import Client  # a controller imports this module, and needs no client

        return Client(self.url, token=token or token_for(self.url), **options)

    def read_status(self) -> EndpointStatus:
        """Its status now. Raises ConnectionLost, InferenceError."""
        with self.connect(timeout_s=STATUS_TIMEOUT_S, num_retries=0) as client:
            return client.status()


def list_endpoints() -> list[FoundEndpoint]:
    """Every endpoint that a run of this machine keeps up, the newest first, and every detached one."""
    of_runs = [
        FoundEndpoint(point.name, point.address, run.id)
        for run in list_running()
        for point in run.endpoints()
        if point.kind == INFERENCE_KIND and point.state == "ready"
    ]
    host, detached = socket.gethostname(), []
    for path in sorted((home() / "endpoints").glob(f"*{CARD_SUFFIX}")):
        with suppress(FileNotFoundError):  # it has just ended
            card = msgspec.json.decode(path.read_bytes(), type=EndpointCard)
            if card.host != host or is_alive(card.pid):  # one of a killed cluster stays
                detached.append(FoundEndpoint(card.name, card.url, is_detached=True))
    urls = {each.url for each in detached}
    return [*(each for each in of_runs if each.url not in urls), *detached]


def find_endpoint(wanted: str | None = None, model: str = "") -> FoundEndpoint:
    """Find the endpoint with this name, or at this address (`http://HOST:PORT`); None for the only one, or for the only
    one that serves `model`, for which several are asked.

    Raises RunError that lists the endpoints, ConfigError for an invalid address.
    """
    if wanted is not None and ":" in wanted:  # no name contains it
        url = normalize_address(wanted)
        return FoundEndpoint(urlsplit(url).netloc, url)
    endpoints = list_endpoints()
    if not endpoints:
        raise RunError("no endpoint is up: `shoal serve deploy MODEL` starts one, `shoal models list` shows the models")
    matching = endpoints if wanted is None else [each for each in endpoints if each.name == wanted]
    if wanted is None and model and len(matching) > 1:
        matching = [each for each in matching if _serves(each, model)] or matching
    if len({each.url for each in matching}) == 1:
        return matching[0]
    names = ", ".join(f"{each.name} ({each.url})" for each in endpoints)
    if not matching:
        raise RunError(f"there is no endpoint {wanted!r}: there is {names}")
    raise RunError(f"several endpoints are up: give --endpoint NAME, or its address. There is {names}")


def _serves(found: FoundEndpoint, model: str) -> bool:
    try:
        return any(each.name == model for each in found.read_status().models)
    except (ConnectionLost, InferenceError):  # it is not up, or has no such authority
        return False


def token_for(url: str) -> str:
    """The access token of this home, for an endpoint of this machine or its record; "" for one elsewhere."""
    is_ours = is_loopback(parse_host(url)) or any(each.url == url for each in list_endpoints())
    return read_existing_token() if is_ours else ""
