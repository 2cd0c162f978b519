"""Several endpoints of one cluster, each of a driver of its own: the first one starts Serve, the last one ends it.

Called by `deploy`. All share Serve's one address: the first has its root, and each other has its name before its paths.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.serve.context import _get_global_client

from shoal.errors import ClusterError, ConfigError
from shoal.ray_call import NAMESPACE
from shoal.serve.on_ray.ingress_front import adopt_front
from shoal.serve.on_ray.ownership import get_driver_id, is_serve_running, list_driver_endpoints, require_free_name
from shoal.serve.on_ray.removal import (
    POLL_S,
    delete_abandoned_applications,
    list_applications,
    shut_down_serve,
)
from shoal.serve.spec.endpoint import EndpointSpec

LOCK_NAME = "serve-start"
LOCK_TIMEOUT_S = 180.0  # for the starts of the endpoints before this one


@ray.remote(num_cpus=0)
class _Lock:
    """Held by the driver that has created it; ends with that driver."""

    def ready(self) -> bool:
        return True


@contextmanager
def lock_serve() -> Iterator[None]:
    """No two drivers start an endpoint at once. Raises ClusterError when the others take too long."""
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            lock: Any = _Lock.options(name=LOCK_NAME, namespace=NAMESPACE).remote()  # type: ignore[attr-defined]
            break
        except ValueError:  # the name is taken
            if time.monotonic() > deadline_s:
                raise ClusterError("another endpoint of this cluster has been starting for minutes") from None
            time.sleep(POLL_S)
    try:
        ray.get(lock.ready.remote())
        yield
    finally:
        ray.kill(lock)


def join_serve(spec: EndpointSpec) -> EndpointSpec | None:
    """The spec of an endpoint that joins those of other living drivers; None if there is none: then it starts Serve.

    Raises ConfigError for a port of its own, which it cannot have then, and ClusterError for a name that is taken.
    """
    require_free_name(spec.name)
    others = list_driver_endpoints(without=get_driver_id()).active
    if not is_serve_running():
        return None
    if not others:
        if not list_applications():  # its last endpoint ended just now, and left Serve to this one
            shut_down_serve()
        return None
    delete_abandoned_applications()
    client = _get_global_client()
    assert client is not None
    options = client.http_config
    if spec.grpc_port is not None or spec.port not in (0, options.port):
        field, value = ("port", spec.port) if spec.grpc_port is None else ("grpc_port", spec.grpc_port)
        problem = f"cannot be had beside {', '.join(others)}, whose port is {options.port}"
        raise ConfigError(f"endpoint.{field}", value, problem, "leave it out, or use another cluster")
    return adopt_front(spec).model_copy(update={"port": options.port, "route_prefix": f"/{spec.name}"})


def end_serve() -> None:
    """End Serve, unless other drivers have endpoints there."""
    if not list_driver_endpoints(without=get_driver_id()).active:
        shut_down_serve()
