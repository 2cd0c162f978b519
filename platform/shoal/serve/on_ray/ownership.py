"""Finds the endpoints that drivers keep up on a cluster. Called before starting anything that needs their capacity.

Serve's applications outlive the driver that started them. The name of an endpoint's controller contains that driver,
and Ray knows which drivers live. Knows nothing of Serve, which takes a second to load.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import ray
from ray._private import state
from ray.util import list_named_actors

from shoal.errors import ClusterError
from shoal.ray_call import NAMESPACE
from shoal.serve.controller.config import parse_actor_name

SERVE_CONTROLLER_NAME, SERVE_NAMESPACE = "SERVE_CONTROLLER_ACTOR", "serve"  # Serve's own; it takes long to load
REMEDY = (
    "the end of its run, or `shoal serve delete` (what Serve's own commands started, with `serve shutdown`),"
    " or use another cluster (`--address local`)"
)


@dataclass
class EndpointOwnership:
    """kept: the endpoints of living drivers; abandoned: the controllers' names of those whose driver is gone."""

    active: list[str] = field(default_factory=list)
    abandoned: dict[str, str] = field(default_factory=dict)


def get_driver_id() -> str:
    """The driver's id, as in `ControllerConfig.driver`."""
    return str(ray.get_runtime_context().get_job_id())


def list_driver_endpoints(without: str = "") -> EndpointOwnership:
    """List the endpoints that `deploy` has started on this cluster, but for those of the driver `without`."""
    living, found = living_drivers(), EndpointOwnership()
    for actor in _controllers():
        endpoint, driver = parse_actor_name(actor)
        if driver == without:
            continue
        if driver in living:
            found.active.append(endpoint)
        elif driver:
            found.abandoned[endpoint] = actor
    return found


def require_free_name(name: str) -> None:
    """Raise ClusterError when a driver keeps an endpoint of this name up, as `deploy` would on a shared cluster."""
    if name in list_driver_endpoints().active:
        problem = f"this cluster has an endpoint {name!r}, and each has a name of its own"
        raise ClusterError(f"{problem}: give endpoint.name=, or use another cluster (`--address local`)")


def cluster_occupied_error(endpoints: list[str]) -> ClusterError:
    """The error for a cluster that already has its one endpoint."""
    there = ", ".join(endpoints) or "without an application"
    return ClusterError(f"Serve runs on this cluster ({there}): close that endpoint first, with {REMEDY}")


def is_serve_running() -> bool:
    """Whether Serve runs on this cluster, also while it is shutting down."""
    named = list_named_actors(all_namespaces=True)
    return {"name": SERVE_CONTROLLER_NAME, "namespace": SERVE_NAMESPACE} in named


def _controllers() -> list[str]:
    named = list_named_actors(all_namespaces=True)
    return [each["name"] for each in named if each["namespace"] == NAMESPACE]


def living_drivers() -> set[str]:
    """Ray's ids of the jobs whose driver lives."""
    return {job["JobID"] for job in state.jobs() if not job["IsDead"]}
