"""Which endpoints of a cluster drivers keep up. Called before anything is started that would find no room beside them.

What Serve runs outlives the driver that started it. The name of an endpoint's controller says which driver that was,
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

SERVE_CONTROLLER_NAME, SERVE_NAMESPACE = "SERVE_CONTROLLER_ACTOR", "serve"  # Serve's own, which takes long to load
REMEDY = (
    "the end of its run, or `shoal serve delete` (what Serve's own commands started, with `serve shutdown`),"
    " or use another cluster (`--address local`)"
)


@dataclass
class EndpointOwnership:
    """kept: the endpoints of drivers that live; abandoned: of those whose driver is gone, the controller's name."""

    active: list[str] = field(default_factory=list)
    abandoned: dict[str, str] = field(default_factory=dict)


def get_driver_id() -> str:
    """As `ControllerSetting.driver` has it."""
    return str(ray.get_runtime_context().get_job_id())


def list_driver_endpoints() -> EndpointOwnership:
    """The endpoints that a call of `deploy` has put on this cluster."""
    living, found = living_drivers(), EndpointOwnership()
    for actor in _controllers():
        endpoint, driver = parse_actor_name(actor)
        if driver in living:
            found.active.append(endpoint)
        elif driver:
            found.abandoned[endpoint] = actor
    return found


def require_no_endpoint() -> None:
    """Raise ClusterError when a driver that lives keeps an endpoint up, as `deploy` would."""
    kept = list_driver_endpoints().active
    if kept:
        raise cluster_occupied_error(kept)


def cluster_occupied_error(endpoints: list[str]) -> ClusterError:
    """The error that says so: a cluster has one."""
    there = ", ".join(endpoints) or "without an application"
    return ClusterError(f"Serve runs on this cluster ({there}): close that endpoint first, with {REMEDY}")


def is_serve_running() -> bool:
    """Whether Serve runs on this cluster, also while it ends."""
    named = list_named_actors(all_namespaces=True)
    return {"name": SERVE_CONTROLLER_NAME, "namespace": SERVE_NAMESPACE} in named


def _controllers() -> list[str]:
    named = list_named_actors(all_namespaces=True)
    return [each["name"] for each in named if each["namespace"] == NAMESPACE]


def living_drivers() -> set[str]:
    """Ray's ids of the jobs whose driver is there."""
    return {job["JobID"] for job in state.jobs() if not job["IsDead"]}
