"""Who keeps the endpoint of a cluster up, and the removal of one whose driver is gone without having closed it.

Called by `deploy`. What Serve runs outlives the driver that started it. The name of an endpoint's controller says which
driver that was, and Ray knows which drivers live. Removes nothing that was not put there by `deploy`.
"""

from __future__ import annotations

import ray
from ray import serve
from ray._private import state
from ray.util import list_named_actors

from shoal.errors import ClusterError
from shoal.serve.controller_setting import kept_endpoint
from shoal.serve.ray_controller import NAMESPACE, end_controller


def this_driver() -> str:
    """As `ControllerSetting.driver` has it."""
    return str(ray.get_runtime_context().get_job_id())


def remove_abandoned() -> None:
    """Make room for an endpoint. Raises ClusterError when Serve runs for a driver that lives, or for anything else."""
    running = serve.status()
    living = _living_drivers()
    abandoned: dict[str, str] = {}  # endpoint -> its controller
    kept: list[str] = []  # endpoints
    for actor in _controllers():
        endpoint, driver = kept_endpoint(actor)
        if driver in living:
            kept.append(endpoint)
        elif driver:
            abandoned[endpoint] = actor
    if running.applications or running.proxies:
        if kept or not abandoned or not running.applications.keys() <= abandoned.keys():
            there = ", ".join(running.applications or kept)
            remedy = "`shoal serve delete`, or the end of its run; what Serve's own commands started, `serve shutdown`"
            raise ClusterError(f"Serve runs on this cluster ({there}): close that endpoint first, with {remedy}")
        serve.shutdown()
    for actor in abandoned.values():
        end_controller(actor)


def _controllers() -> list[str]:
    named = list_named_actors(all_namespaces=True)
    return [each["name"] for each in named if each["namespace"] == NAMESPACE]


def _living_drivers() -> set[str]:
    return {job["JobID"] for job in state.jobs() if not job["IsDead"]}
