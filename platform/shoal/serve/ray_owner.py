"""The removal of an endpoint whose driver is gone without having closed it.

Called by `deploy`. Removes nothing that was not put there by `deploy`.
"""

from __future__ import annotations

from ray import serve

from shoal.serve.ray_controller import end_controller
from shoal.serve.ray_kept import endpoints_of_drivers, occupied


def remove_abandoned() -> None:
    """Make room for an endpoint. Raises ClusterError when Serve runs for a driver that lives, or for anything else."""
    running, found = serve.status(), endpoints_of_drivers()
    if running.applications or running.proxies:
        if found.kept or not found.abandoned or not running.applications.keys() <= found.abandoned.keys():
            raise occupied(list(running.applications) or found.kept)
        serve.shutdown()
    for actor in found.abandoned.values():
        end_controller(actor)
