"""The endpoints of one cluster: the first one starts Serve, the last one ends it.

Called by `deploy`. All share Serve's one address: the first has its root, and each other has its name before its paths.
That stays so while they are up: no endpoint's address depends on which others come and go. Endpoints of drivers that
died without closing them are removed first: of what runs in Serve, only what `deploy` started.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.context import _disconnect, _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from shoal.cluster.ports import find_free_port
from shoal.errors import ClusterError, ConfigError
from shoal.network_address import is_loopback
from shoal.ray_call import NAMESPACE
from shoal.serve.on_ray.controller_actor import stop_controller
from shoal.serve.on_ray.ingress_front import adopt_front, call_on_head, prepare_front
from shoal.serve.on_ray.ownership import (
    cluster_occupied_error,
    is_serve_running,
    list_driver_endpoints,
    require_free_name,
)
from shoal.serve.spec.endpoint import ROOT_PATHS, EndpointSpec
from shoal.serve.spec.reach import OTHER_REACH

logger = logging.getLogger(__name__)

LOCK_NAME = "serve-start"
LOCK_TIMEOUT_S = 180.0  # for those who start or end Serve; what then takes long, the models, is outside
SHUTDOWN_TIMEOUT_S = 60.0  # for a Serve that is ending
POLL_S = 0.1


def remove_abandoned_endpoints() -> None:
    """Remove the abandoned endpoints, and Serve. Raises ClusterError when Serve runs for anything else.

    Waits for a Serve that is ending: one without an application, or whose applications are being deleted.
    """
    deadline_s = time.monotonic() + SHUTDOWN_TIMEOUT_S
    is_shut = is_told = False
    while is_serve_running():
        applications, is_ending = _applications()
        endpoints = list_driver_endpoints()  # checked last: a driver's controller exists before its Serve
        is_abandoned = bool(endpoints.abandoned) and applications <= endpoints.abandoned.keys()
        if endpoints.active or not (is_abandoned or is_ending) or time.monotonic() > deadline_s:
            raise cluster_occupied_error(sorted(applications) or list(endpoints.active))
        if is_abandoned and not is_shut:
            shut_down_serve()
            is_shut, deadline_s = True, time.monotonic() + SHUTDOWN_TIMEOUT_S
        elif not (is_shut or is_told):
            is_told = True
            logger.warning("Ray Serve is ending on this cluster, or has no application: waiting for its end")
        time.sleep(POLL_S)
    for actor in list_driver_endpoints().abandoned.values():
        stop_controller(actor)


def shut_down_serve() -> None:
    """End Serve on this cluster, and return once it has gone.

    `serve.shutdown` waits within a call that Serve's controller never answers: it is killed meanwhile. Ray retries
    calls to that actor without limit, and reports the failure to this process's terminal. So wait outside of a call.
    """
    if not is_serve_running():
        return
    try:
        client = _get_global_client()
        assert client is not None
        client.shutdown_cached_handles()
        ray.get(client._controller.graceful_shutdown.remote(wait=False), timeout=SHUTDOWN_TIMEOUT_S)
    except (RayActorError, RayServeException):  # it has just ended
        pass
    deadline_s = time.monotonic() + SHUTDOWN_TIMEOUT_S
    while is_serve_running():
        if time.monotonic() > deadline_s:
            logger.warning("Ray Serve has not ended within %g s", SHUTDOWN_TIMEOUT_S)
            break
        time.sleep(POLL_S)
    _disconnect()


def delete_abandoned_applications() -> None:
    """Remove the endpoints of dead drivers from a Serve that others use."""
    applications = list_applications()
    for endpoint, actor in list_driver_endpoints().abandoned.items():
        if endpoint in applications:
            serve.delete(endpoint)
        stop_controller(actor)


def list_applications() -> set[str]:
    return _applications()[0]


def _applications() -> tuple[set[str], bool]:
    """Serve's applications, and whether all are being deleted."""
    try:
        applications = serve.status().applications
    except RayActorError:  # Serve has just ended
        return set(), True
    return set(applications), all(each.status == ApplicationStatus.DELETING for each in applications.values())


@ray.remote(num_cpus=0)
class _Lock:
    """Held by the driver that has created it; ends with that driver."""

    def ready(self) -> bool:
        return True


@contextmanager
def lock_serve() -> Iterator[None]:
    """No two drivers start or end Serve at once. Raises ClusterError when the others take too long."""
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            lock: Any = _Lock.options(name=LOCK_NAME, namespace=NAMESPACE).remote()  # type: ignore[attr-defined]
            break
        except ValueError:  # the name is taken
            if time.monotonic() > deadline_s:
                raise ClusterError(
                    "another endpoint of this cluster has been starting or ending Serve for minutes"
                ) from None
            time.sleep(POLL_S)
    try:
        ray.get(lock.ready.remote())
        yield
    finally:
        ray.kill(lock)


def join_serve(spec: EndpointSpec) -> tuple[EndpointSpec, bool]:
    """The spec with its address, and whether the endpoint is the cluster's first, which starts Serve and has the root.

    Each other one is below its name. Abandoned endpoints are removed. Call it within `lock_serve`.

    Raises ConfigError for a name that is taken, and for an address or a port that cannot be had; ClusterError where
    Serve runs for anything but endpoints of `deploy`.
    """
    require_free_name(spec.name)
    if not (is_serve_running() and list_driver_endpoints().active):
        remove_abandoned_endpoints()
        host = "127.0.0.1" if is_loopback(spec.host) else "0.0.0.0"
        ports = {
            "port": spec.port or call_on_head(find_free_port, host),
            "grpc_port": call_on_head(find_free_port, host) if spec.grpc_port == 0 else spec.grpc_port,
        }
        return prepare_front(spec.model_copy(update=ports), ports), True
    delete_abandoned_applications()
    if spec.name in ROOT_PATHS:
        problem = "is a path of the endpoint that has the root of this cluster's address"
        raise ConfigError("endpoint.name", spec.name, problem, "give another name")
    client = _get_global_client()
    assert client is not None
    grpc = client.get_serve_details()["grpc_options"]
    has_grpc = bool(grpc.get("grpc_servicer_functions"))
    ports = {"port": client.http_config.port, "grpc_port": grpc["port"] if has_grpc else None}
    for field, port in ports.items():
        wanted = getattr(spec, field)
        if wanted not in (None, 0, port) or (wanted is not None and port is None):
            theirs = f"theirs is {port}" if port else "the first of them has no gRPC"
            problem = f"is not that of the cluster's endpoints, which share one address: {theirs}"
            raise ConfigError(f"endpoint.{field}", wanted, problem, OTHER_REACH)
    if spec.grpc_port is None:
        ports["grpc_port"] = None
    return adopt_front(spec).model_copy(update={**ports, "route_prefix": f"/{spec.name}"}), False


def end_endpoint(name: str) -> None:
    """End an endpoint of any driver, as that driver would. Raises ClusterError when there is none of this name."""
    endpoints = list_driver_endpoints()
    actor = (endpoints.active | endpoints.abandoned).get(name)
    if actor is None:
        there = ", ".join(endpoints.active) or "there is none"
        raise ClusterError(f"there is no endpoint {name!r} on this cluster ({there})")
    end_application(name)
    stop_controller(actor)


def end_application(name: str) -> None:
    """Remove an endpoint from Serve once it has answered its requests, and Serve with the last one."""
    try:
        if is_serve_running():
            serve.delete(name)
    finally:  # also after an interrupt
        with lock_serve():
            endpoints = list_driver_endpoints()
            others = endpoints.active.keys() | (list_applications() - endpoints.abandoned.keys())
            if not others - {name}:
                shut_down_serve()
