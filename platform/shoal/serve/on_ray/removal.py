"""Removes endpoints whose driver died without closing them.

Called by `deploy`. Removes only what `deploy` started.
"""

from __future__ import annotations

import logging
import time

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.context import _disconnect, _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from shoal.serve.on_ray.controller_actor import stop_controller
from shoal.serve.on_ray.ownership import cluster_occupied_error, is_serve_running, list_driver_endpoints

logger = logging.getLogger(__name__)

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
        found = list_driver_endpoints()  # checked last: a driver's controller exists before its Serve
        is_abandoned = bool(found.abandoned) and applications <= found.abandoned.keys()
        if found.active or not (is_abandoned or is_ending) or time.monotonic() > deadline_s:
            raise cluster_occupied_error(sorted(applications) or list(found.active))
        if is_abandoned and not is_shut:
            shut_down_serve()
            is_shut, deadline_s = True, time.monotonic() + SHUTDOWN_TIMEOUT_S
        elif not (is_shut or is_told):
            is_told = True
            logger.warning("Ray Serve is ending on this cluster, or has no application: waiting for its end")
        time.sleep(POLL_S)
    for actor in list_driver_endpoints().abandoned.values():
        stop_controller(actor)


def shut_down_serve(timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
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
        ray.get(client._controller.graceful_shutdown.remote(wait=False), timeout=timeout_s)
    except (RayActorError, RayServeException):  # it has just ended
        pass
    deadline_s = time.monotonic() + timeout_s
    while is_serve_running():
        if time.monotonic() > deadline_s:
            logger.warning("Ray Serve has not ended within %g s", timeout_s)
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
    """Serve's applications."""
    return _applications()[0]


def _applications() -> tuple[set[str], bool]:
    """Serve's applications, and whether all are being deleted."""
    try:
        found = serve.status().applications
    except RayActorError:  # Serve has just ended
        return set(), True
    return set(found), all(each.status == ApplicationStatus.DELETING for each in found.values())
