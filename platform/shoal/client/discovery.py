"""Finds the endpoints of this machine in the run record, and their token.

Called by the command line and by programs that name an endpoint instead of its address. Only reads; calls no endpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from shoal.client.address import normalize_address, parse_host
from shoal.errors import RunError
from shoal.home import read_existing_token
from shoal.network_address import is_loopback
from shoal.runs import list_running

INFERENCE_KIND = "inference"  # the kind of an endpoint in the record; gateways have another
GRPC_KIND = "grpc"  # the kind of its second address, host:port


@dataclass(frozen=True)
class FoundEndpoint:
    """A ready endpoint. `run_id` is the run that serves it; "" for one given by its address."""

    name: str
    url: str
    run_id: str = ""


def list_endpoints() -> list[FoundEndpoint]:
    """Every endpoint that a run of this machine keeps up, the newest first."""
    return [
        FoundEndpoint(point.name, point.address, run.id)
        for run in list_running()
        for point in run.endpoints()
        if point.kind == INFERENCE_KIND and point.state == "ready"
    ]


def find_endpoint(wanted: str | None = None) -> FoundEndpoint:
    """Find the endpoint with this name, or at this address (`http://HOST:PORT`); None for the only one.

    Raises RunError that lists the endpoints, ConfigError for an invalid address.
    """
    if wanted is not None and ":" in wanted:  # no name contains it
        url = normalize_address(wanted)
        return FoundEndpoint(urlsplit(url).netloc, url)
    there = list_endpoints()
    if not there:
        raise RunError("no endpoint is up: `shoal serve deploy MODEL` starts one, `shoal models list` shows the models")
    matching = there if wanted is None else [each for each in there if each.name == wanted]
    if len({each.url for each in matching}) == 1:
        return matching[0]
    names = ", ".join(f"{each.name} ({each.url})" for each in there)
    if not matching:
        raise RunError(f"there is no endpoint {wanted!r}: there is {names}")
    raise RunError(f"several endpoints are up: give --endpoint NAME, or its address. There is {names}")


def token_for(url: str) -> str:
    """The access token of this home, for an endpoint of this machine or its record; "" for one elsewhere."""
    is_ours = is_loopback(parse_host(url)) or any(each.url == url for each in list_endpoints())
    return read_existing_token() if is_ours else ""
