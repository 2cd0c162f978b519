"""The workers of a replica as Ray's actors, in the bundles of the replica's placement group.

Called by the replica's shell. Ray ends them with the replica, and they end themselves when its connection does.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shoal.errors import ClusterError, summarize_error
from shoal.extend.serve import EndpointSpec
from shoal.extend.sync import ChannelAddress
from shoal.libs.gang.gang import Gang
from shoal.libs.gang.team import GangLost

START_S = 60.0


class GangWorker:
    """Ray's object: a GangMember in a thread; its process ends with the replica."""

    def __init__(self, torch_threads: int) -> None:
        from shoal.libs.gang.member import GangMember  # here: the replica needs no process groups

        self._member = GangMember(ray.util.get_node_ip_address(), lambda: os._exit(0))
        threading.Thread(target=self._member.serve, args=(torch_threads,), name="shoal-gang", daemon=True).start()

    def get_address(self) -> ChannelAddress:
        return self._member.address


class RayLauncher:
    """A Launcher on Ray. Made in a replica with a placement group of as many bundles as it starts workers."""

    def __init__(self, spec: EndpointSpec) -> None:
        self._spec, self._workers = spec, list[Any]()

    def start(self, count: int) -> list[ChannelAddress]:
        group, worker = get_current_placement_group(), ray.remote(GangWorker)
        if group is None:
            raise ClusterError("a replica of several workers has no placement group: deploy it with `shoal serve`")
        for rank in range(count):
            bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            options = worker.options(
                num_cpus=0, scheduling_strategy=bundle
            )  # the bundle reserves them, spares share it
            self._workers.append(options.remote(self._spec.torch_threads))
        try:
            addresses: list[ChannelAddress] = ray.get(
                [each.get_address.remote() for each in self._workers], timeout=START_S
            )
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise GangLost(f"it did not start: {summarize_error(error)}") from error
        return addresses

    def stop(self) -> None:
        while self._workers:
            ray.kill(self._workers.pop(), no_restart=True)


def start_gang(spec: EndpointSpec) -> Gang:
    """Start the workers of this replica. Raises ClusterError."""
    assert spec.split is not None
    gang = Gang(RayLauncher(spec), spec.num_workers, spec.split, RayLauncher(spec))
    gang.start()
    return gang
