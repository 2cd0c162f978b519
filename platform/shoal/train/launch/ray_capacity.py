"""The capacity of the cluster for a run's workers: total, free, and whether the workers have been placed.

Called by the flow before and during an attempt.
"""

from __future__ import annotations

from collections.abc import Callable

import ray
from ray.util.placement_group import placement_group_table

from shoal.cluster.admission import RunAdmission
from shoal.cluster.growth import find_growth
from shoal.errors import PlanError
from shoal.parallel.layers.precision import check_precision
from shoal.train.spec import TrainSpec


def resolve_device(spec: TrainSpec) -> TrainSpec:
    """The spec with its device chosen: `auto` becomes CUDA if there is a GPU for each worker.

    Raises PlanError when the workers' device cannot train in `parallel.precision`.
    """
    if spec.device == "auto":
        has_gpus = _count_resource(spec, "GPU") >= spec.workers
        spec = spec.model_copy(update={"device": "cuda" if has_gpus else "cpu"})
    check_precision(spec.parallel.precision, spec.device)
    return spec


def count_workers_that_fit(spec: TrainSpec) -> int:
    """How many workers fit on the present hosts when they are empty."""
    return _count_resource(spec, _resource_name(spec))


def _count_resource(spec: TrainSpec, resource: str) -> int:
    """Of the cluster; where the workers share memory, of the driver's host, on which they all are."""
    if not (spec.has_replicas and spec.applied_sync.shares_memory):
        return int(ray.cluster_resources().get(resource, 0))
    here = ray.get_runtime_context().get_node_id()
    return int(next(node["Resources"].get(resource, 0) for node in ray.nodes() if node["NodeID"] == here))


def count_free_workers(spec: TrainSpec) -> int:
    """How many workers fit now, alongside running work."""
    return int(ray.available_resources().get(_resource_name(spec), 0))


class WorkerPlacement:
    """The placement group of one attempt's workers. Ray Train creates it anew each minute until it is placed.

    It has no name: it is recognised by the driver's job id at its id's end, and by its creation after this object.
    """

    def __init__(self) -> None:
        self._job = str(ray.get_runtime_context().get_job_id())
        self._earlier = set(self._get_states())

    def get_state(self) -> str:
        """PENDING or CREATED, in Ray's terms; "" while there is none."""
        found = [state for name, state in self._get_states().items() if name not in self._earlier]
        return next((state for state in ("CREATED", "PENDING") if state in found), "")

    def _get_states(self) -> dict[str, str]:
        return {name: each["state"] for name, each in placement_group_table().items() if name.endswith(self._job)}


def require_capacity(spec: TrainSpec, record: Callable[..., None], admission: RunAdmission) -> None:
    """Wait until the workers fit and it is the run's turn: for nodes that an autoscaler adds, or for other work to end.

    Of a range of workers the smallest number must fit. Raises PlanError when the cluster can never hold so many
    workers, NoCapacity when they have not fitted within the spec's `wait`.

    record: records an event: `EventLog.record_event`
    """
    resource, needed = _resource_name(spec), spec.min_workers or spec.workers
    there, bundles = count_workers_that_fit(spec), [{resource: 1.0}] * needed
    if there < needed and not (growth := find_growth()).can_hold(bundles):
        remedy = f"use workers={there}, or a larger cluster" if there else f"start a cluster with {resource}s"
        added = f", and its autoscaler may add no more than {growth}" if growth else ""
        raise PlanError("workers", needed, f"the cluster has {there} {resource}s{added}", remedy)
    each = f"{needed} workers need a {resource} each" if needed > 1 else f"a worker needs a {resource}"
    admission.wait(bundles, each, spec.wait, record)


def _resource_name(spec: TrainSpec) -> str:
    return "GPU" if spec.device == "cuda" else "CPU"
