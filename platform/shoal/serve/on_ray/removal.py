"""The removal of an endpoint whose driver is gone without having closed it.

Called by `deploy`. Removes nothing that was not put there by `deploy`.
"""

from __future__ import annotations

import logging
import time

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.schema import ApplicationStatus

from shoal.serve.on_ray.controller_actor import end_controller
from shoal.serve.on_ray.ownership import endpoints_of_drivers, has_serve, occupied

logger = logging.getLogger(__name__)

END_S = 60.0  # for a Serve that is ending: `serve.shutdown` itself returns after half a minute, whatever is left
POLL_S = 0.1


def remove_abandoned() -> None:
    """Make room for an endpoint. Raises ClusterError when Serve runs for a driver that lives, or for anything else.

    A Serve that is ending is waited for: one without an application, or whose applications are being deleted.
    """
    deadline_s = time.monotonic() + END_S
    is_shut = is_told = False
    while has_serve():
        applications, is_ending = _applications()
        found = endpoints_of_drivers()  # looked at last: a driver's controller is there before its Serve
        is_abandoned = bool(found.abandoned) and applications <= found.abandoned.keys()
        if found.kept or not (is_abandoned or is_ending) or time.monotonic() > deadline_s:
            raise occupied(sorted(applications) or found.kept)
        if is_abandoned and not is_shut:
            serve.shutdown()
            is_shut, deadline_s = True, time.monotonic() + END_S
        elif not (is_shut or is_told):
            is_told = True
            logger.warning("Ray Serve is ending on this cluster, or has no application: waiting for its end")
        time.sleep(POLL_S)
    for actor in endpoints_of_drivers().abandoned.values():
        end_controller(actor)


def _applications() -> tuple[set[str], bool]:
    """Of Serve, and whether none is to stay."""
    try:
        found = serve.status().applications
    except RayActorError:  # it has just ended
        return set(), True
    return set(found), all(each.status == ApplicationStatus.DELETING for each in found.values())
