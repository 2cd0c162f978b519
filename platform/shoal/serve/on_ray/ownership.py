"""Finds the endpoints of a cluster. Called before starting anything that needs their capacity.

Serve's applications outlive the driver that started them. The name of an endpoint's controller contains that driver,
and Ray knows which drivers live; a detached endpoint needs none. Knows nothing of Serve, which takes a second to load.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from shoal.cluster.admission import living_drivers
from shoal.errors import ClusterError
from shoal.ray_call import NAMESPACE, call_or_none
from shoal.serve.controller.config import parse_actor_name
from shoal.serve.spec.endpoint import DETACHED, describe_taken_name

SERVE_CONTROLLER_NAME, SERVE_NAMESPACE = "SERVE_CONTROLLER_ACTOR", "serve"  # Serve's own; it takes long to load
REMEDY = "end it with `serve shutdown`, or use another cluster (`--address local`)"


@dataclass
class EndpointOwnership:
    """The names of the controllers, by endpoint.

    active:    of living drivers, and detached
    abandoned: of drivers that are gone
    """

    active: dict[str, str] = field(default_factory=dict)
    abandoned: dict[str, str] = field(default_factory=dict)


def list_driver_endpoints() -> EndpointOwnership:
    """List the endpoints that `deploy` has started on this cluster."""
    living, endpoints = living_drivers(), EndpointOwnership()
    for actor in list_our_actors():
        endpoint, driver = parse_actor_name(actor)
        if driver in living or driver == DETACHED:
            endpoints.active[endpoint] = actor
        elif driver:
            endpoints.abandoned[endpoint] = actor
    return endpoints


def list_our_actors() -> list[str]:
    """The names of the named actors of Shoal on this cluster."""
    named = list_named_actors(all_namespaces=True)
    return [each["name"] for each in named if each["namespace"] == NAMESPACE]


def require_free_name(name: str) -> None:
    """Raise ConfigError when this cluster has an endpoint of this name that is not abandoned."""
    actor = list_driver_endpoints().active.get(name)
    if actor is not None:
        raise describe_taken_name(name, read_owner(actor))


def read_owner(actor: str) -> str:
    """Who deployed the endpoint of the controller of this name; "" while that does not answer."""
    with suppress(ValueError):  # it has just ended
        status = call_or_none(ray.get_actor(actor, NAMESPACE).call, "status", away=(RayError,))
        return str((status or {}).get("owner", ""))
    return ""


def cluster_occupied_error(applications: list[str]) -> ClusterError:
    """The error for a cluster whose Serve was not started by `deploy`, so that its address is not known."""
    there = ", ".join(applications) or "without an application"
    return ClusterError(f"Serve runs on this cluster ({there}), and not for `shoal serve deploy`: {REMEDY}")


def is_serve_running() -> bool:
    """Whether Serve runs on this cluster, also while it is shutting down."""
    named = list_named_actors(all_namespaces=True)
    return {"name": SERVE_CONTROLLER_NAME, "namespace": SERVE_NAMESPACE} in named
