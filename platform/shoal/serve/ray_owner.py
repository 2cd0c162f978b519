"""The removal of an endpoint whose driver is gone without having closed it.

Called by `deploy`. Removes nothing that was not put there by `deploy`.
"""

from __future__ import annotations

import time

from ray import serve
from ray.exceptions import RayActorError

from shoal.serve.ray_controller import end_controller
from shoal.serve.ray_kept import endpoints_of_drivers, has_serve, occupied

END_S = 60.0  # for what is ending already: `serve.shutdown` itself returns after half a minute, whatever is left
POLL_S = 0.1


def remove_abandoned() -> None:
    """Make room for an endpoint. Raises ClusterError when Serve runs for a driver that lives, or for anything else."""
    found = endpoints_of_drivers()
    if has_serve():
        applications = _applications()
        is_abandoned = bool(found.abandoned) and applications <= found.abandoned.keys()
        is_ending = not applications and not found.abandoned
        if found.kept or not (is_abandoned or is_ending):
            raise occupied(sorted(applications) or found.kept)
        if is_abandoned:
            serve.shutdown()
        _wait_for_end()
    for actor in found.abandoned.values():
        end_controller(actor)


def _applications() -> set[str]:
    try:
        return set(serve.status().applications)
    except RayActorError:  # it has just ended
        return set()


def _wait_for_end() -> None:
    deadline_s = time.monotonic() + END_S
    while has_serve():
        if time.monotonic() > deadline_s:
            raise occupied([])
        time.sleep(POLL_S)
