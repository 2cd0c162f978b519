"""Where a run's workers can be: what the cluster has, what of it is free, and whether they have found a place there.

Called by the flow before and during an attempt.
"""

from __future__ import annotations

import ray
from ray.util.placement_group import placement_group_table

from shoal.cluster.capacity import wait_for_resource
from shoal.errors import ClusterError, PlanError
from shoal.train.spec import TrainSpec


def resolve_device(spec: TrainSpec) -> TrainSpec:
    """The spec with its device chosen: `auto` is CUDA where the cluster has one for each worker."""
    if spec.device != "auto":
        return spec
    has_gpus = ray.cluster_resources().get("GPU", 0) >= spec.workers
    return spec.model_copy(update={"device": "cuda" if has_gpus else "cpu"})


def count_workers_that_fit(spec: TrainSpec) -> int:
    """How many the hosts of now could hold, if nothing else were there."""
    return int(ray.cluster_resources().get(_resource_name(spec), 0))


def count_free_workers(spec: TrainSpec) -> int:
    """For how many workers there is room now, beside what runs."""
    return int(ray.available_resources().get(_resource_name(spec), 0))


class WorkerPlacement:
    """The placement of one attempt's workers, which Ray Train makes, and makes anew each minute until it has a place.

    It has no name: it is known by this driver's job, in which its id ends, and by being made after this.
    """

    def __init__(self) -> None:
        self._job = str(ray.get_runtime_context().get_job_id())
        self._earlier = set(self._get_states())

    def get_state(self) -> str:
        """PENDING or CREATED, in Ray's words; "" while there is none."""
        found = [state for name, state in self._get_states().items() if name not in self._earlier]
        return next((state for state in ("CREATED", "PENDING") if state in found), "")

    def _get_states(self) -> dict[str, str]:
        return {name: each["state"] for name, each in placement_group_table().items() if name.endswith(self._job)}


def require_capacity(spec: TrainSpec, wait_s: float) -> None:
    """Raises PlanError when the cluster can never hold so many workers, ClusterError when `wait_s` frees no place."""
    resource, there = _resource_name(spec), count_workers_that_fit(spec)
    if there < spec.workers:
        remedy = f"use workers={there}, or a larger cluster" if there else f"start a cluster with {resource}s"
        raise PlanError("workers", spec.workers, f"the cluster has {there} {resource}s", remedy)
    free = wait_for_resource(resource, spec.workers, wait_s)
    if free < spec.workers:
        problem = f"{spec.workers} workers need a {resource} each, and {int(free)} of {there} are free"
        raise ClusterError(f"{problem}: wait for what runs, or end it (`shoal status`), or use fewer workers")


def _resource_name(spec: TrainSpec) -> str:
    return "GPU" if spec.device == "cuda" else "CPU"
