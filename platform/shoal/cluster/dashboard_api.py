"""The REST API of a Ray dashboard: one request, one answer, and errors that name the remedy.

Called by `jobs` and by `shoal status`; needs the token of the cluster and never imports ray.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx2

from shoal.cluster.cluster_handle import ClusterHandle
from shoal.errors import ClusterError, ConnectionLost, RunError

REQUEST_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ClusterResources:
    """The resources of a cluster's living nodes."""

    num_nodes: int
    num_cpus: float
    num_gpus: float
    memory_bytes: int
    object_store_bytes: int
    started_at_s: float  # Unix time, of the head


def connect(cluster: ClusterHandle) -> httpx2.Client:
    """A client for `request_json`; the caller closes it."""
    return httpx2.Client(
        base_url=cluster.dashboard_url,
        headers={"Authorization": f"Bearer {cluster.token}"},
        timeout=REQUEST_TIMEOUT_S,
        trust_env=not cluster.is_local,  # loopback needs no proxy
        verify=_make_ssl_context() if cluster.dashboard_url.startswith("https:") else False,  # of plain HTTP, none
    )


@cache
def _make_ssl_context() -> ssl.SSLContext:
    """This machine's trusted certificates. Reading them takes 50 ms, and a run's state is polled twice a second."""
    return httpx2.create_ssl_context()


def request_json(client: httpx2.Client, method: str, path: str, json: object = None) -> Any:
    """One request and its JSON answer. Raises ConnectionLost, RunError (no such thing), ClusterError (refused)."""
    try:
        answer = client.request(method, path, json=json)
    except httpx2.HTTPError as error:
        remedy = "see that a cluster is up there; --address, $RAY_API_SERVER_ADDRESS or $RAY_ADDRESS names it"
        raise ConnectionLost(f"no answer from {client.base_url}: {error or type(error).__name__}; {remedy}") from None
    if answer.status_code in (401, 403):
        raise ClusterError(f"{client.base_url} refuses the token: set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to its own")
    if answer.status_code == 404:
        raise RunError(f"{client.base_url} knows no {path.removeprefix('/api/')}")
    if answer.status_code != 200:
        reason = (answer.text.strip().splitlines() or ["no reason given"])[-1]
        raise ClusterError(f"{client.base_url} answered {answer.status_code}: {reason}")
    try:
        return answer.json()
    except ValueError:
        raise ClusterError(f"{client.base_url} is no dashboard of Ray: what it answers is no JSON") from None


def get_resources(cluster: ClusterHandle) -> ClusterResources:
    """The cluster's resources. Raises ConnectionLost, ClusterError."""
    with connect(cluster) as client:
        answer = request_json(client, "GET", "/nodes?view=summary")
    raylets = [node["raylet"] for node in answer["data"]["summary"] if node["raylet"].get("state") == "ALIVE"]
    totals = [raylet.get("resourcesTotal", {}) for raylet in raylets]
    heads = [int(raylet["startTimeMs"]) / 1000 for raylet in raylets if raylet.get("isHeadNode")]
    return ClusterResources(
        num_nodes=len(raylets),
        num_cpus=sum(total.get("CPU", 0.0) for total in totals),
        num_gpus=sum(total.get("GPU", 0.0) for total in totals),
        memory_bytes=int(sum(total.get("memory", 0.0) for total in totals)),
        object_store_bytes=int(sum(total.get("objectStoreMemory", 0.0) for total in totals)),
        started_at_s=min(heads, default=0.0),
    )
