"""The REST API of a Ray dashboard: one request, one answer, and errors that name the remedy.

Called by `jobs` and by `shoal status`; needs the token of the cluster and never imports ray.
"""

from __future__ import annotations

import ssl
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx2

from shoal.cluster.cluster_handle import ClusterHandle
from shoal.errors import ClusterError, ConnectionLost, RunError

REQUEST_TIMEOUT_S = 60.0
MAX_LISTED = 10_000  # that Ray lists at once


@dataclass(frozen=True)
class ClusterResources:
    """The resources of a cluster's living nodes."""

    num_nodes: int
    num_cpus: float
    num_gpus: float
    memory_bytes: int
    object_store_bytes: int
    started_at_s: float  # Unix time, of the head


@dataclass(frozen=True)
class NodeUsage:
    """A living node. Its load, memory and disk are those of the whole host, and None before Ray has measured them.

    started_at: Unix time
    gpus: name, utilisation in percent, and bytes of memory used and in all
    """

    id: str
    host: str
    address: str
    is_head: bool
    started_at: float
    num_cpus: float
    num_gpus: float
    cpu_percent: float | None
    memory_used_bytes: int | None
    memory_bytes: int | None
    gpus: list[dict[str, Any]]


@dataclass(frozen=True)
class Reservation:
    """What the processes of one job have reserved on one node.

    job:       its submission id, or Ray's number of one that was not submitted
    run:       the run that it was submitted for; "" for a job of others
    processes: their number by kind
    """

    job: str
    run: str
    node: str
    resources: dict[str, float]
    processes: dict[str, int]


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


def list_nodes(client: httpx2.Client) -> list[NodeUsage]:
    """The living nodes, the head first. Raises ConnectionLost, ClusterError."""
    answer = request_json(client, "GET", "/nodes?view=summary")
    nodes = [_parse_node(each) for each in answer["data"]["summary"] if each["raylet"].get("state") == "ALIVE"]
    return sorted(nodes, key=lambda node: (not node.is_head, node.host, node.address))


def _parse_node(entry: Mapping[str, Any]) -> NodeUsage:
    raylet, memory = entry["raylet"], entry.get("mem") or (None, None, None, None)
    totals, mib = raylet.get("resourcesTotal", {}), 1 << 20
    return NodeUsage(
        id=raylet["nodeId"],
        host=entry.get("hostname") or raylet.get("nodeManagerHostname", ""),
        address=raylet.get("nodeManagerAddress", ""),
        is_head=bool(raylet.get("isHeadNode")),
        started_at=int(raylet["startTimeMs"]) / 1000,
        num_cpus=totals.get("CPU", 0.0),
        num_gpus=totals.get("GPU", 0.0),
        cpu_percent=entry.get("cpu"),
        memory_used_bytes=memory[3],
        memory_bytes=memory[0],
        gpus=[
            {
                "name": each.get("name", ""),
                "percent": each.get("utilizationGpu"),
                "memory_used_bytes": mib * each.get("memoryUsed", 0),
                "memory_bytes": mib * each.get("memoryTotal", 0),
            }
            for each in entry.get("gpus") or ()
        ],
    )


def list_reservations(client: httpx2.Client) -> list[Reservation]:
    """What each job has on each node: its actors, and the places of its placement groups. Plain tasks, which last
    seconds, are not among them. Raises ConnectionLost, ClusterError."""
    jobs = {each["job_id"]: each for each in request_json(client, "GET", "/api/jobs/")}
    found: defaultdict[tuple[str, str], tuple[Counter[str], Counter[str]]] = defaultdict(lambda: (Counter(), Counter()))
    for actor in list_state(client, "actors", "ALIVE"):
        resources, processes = found[actor["job_id"], actor["node_id"]]
        processes[actor["class_name"].partition(":")[0]] += 1
        if not actor["placement_group_id"]:
            resources.update(actor["required_resources"])
    for group in list_state(client, "placement_groups", "CREATED"):
        for bundle in group["bundles"]:
            found[group["creator_job_id"], bundle["node_id"]][0].update(bundle["unit_resources"])
    reservations = []
    for (number, node), (resources, processes) in sorted(found.items()):
        job = jobs.get(number, {})
        amounts = {name: float(resources[name]) for name in ("CPU", "GPU")}
        name = job.get("submission_id") or number
        reservations.append(Reservation(name, find_run_id(job), node, amounts, dict(processes)))
    return reservations


def find_run_id(job: Mapping[str, Any]) -> str:
    """The run that an entry of Ray's list of jobs was submitted for; "" for a job of others."""
    variables: dict[str, str] = (job.get("runtime_env") or {}).get("env_vars") or {}
    return variables.get("SHOAL_RUN_ID", "")


def list_state(client: httpx2.Client, what: str, state: str = "") -> list[dict[str, Any]]:
    """Ray's list of actors, nodes or placement groups, those of one state only. Raises ConnectionLost, ClusterError."""
    which = f"&filter_keys=state&filter_predicates=%3D&filter_values={state}" if state else ""
    answer = request_json(client, "GET", f"/api/v0/{what}?detail=1&limit={MAX_LISTED}{which}")
    found: list[dict[str, Any]] = answer["data"]["result"]["result"]
    return found
