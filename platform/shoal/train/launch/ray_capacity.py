"""The capacity of the cluster for a run's workers: total, free, and whether the workers have been placed.

Called by the flow before and during an attempt.
"""

from __future__ import annotations

from collections.abc import Callable

import ray
from ray.util.placement_group import placement_group_table

from shoal.cluster.capacity import NODES_WAIT_S, WaitLog, rank_hosts, wait_for_nodes, wait_for_resource
from shoal.cluster.growth import find_growth
from shoal.errors import ClusterError, PlanError
from shoal.parallel.layers.precision import check_precision
from shoal.train.spec import TrainSpec

CAPACITY_WAIT_S = 10.0  # the default wait without an autoscaler: for a run that has just ended to release its resources


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
    """Of the cluster; where the workers share memory, of the host on which they all are."""
    if not _is_on_one_host(spec):
        return int(ray.cluster_resources().get(resource, 0))
    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes()}
    host = _choose_host(spec, resource)
    return int(nodes[host].get(resource, 0)) if host else 0


def _is_on_one_host(spec: TrainSpec) -> bool:
    return spec.has_replicas and spec.applied_sync.shares_memory


def find_remote_host(spec: TrainSpec) -> str:
    """The node for a run whose workers share memory, if it is another than this one; "" for this one and other runs."""
    if not _is_on_one_host(spec):
        return ""
    host = _choose_host(spec, _resource_name(spec))
    return "" if host == ray.get_runtime_context().get_node_id() else host


def _choose_host(spec: TrainSpec, resource: str) -> str:
    hosts = rank_hosts(ray.nodes(), ray.get_runtime_context().get_node_id(), resource, spec.workers)
    return hosts[0] if hosts else ""


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


def require_capacity(spec: TrainSpec, record: Callable[..., None]) -> None:
    """Wait until the workers fit: for nodes that an autoscaler adds, or for other work to end.

    Of a range of workers the smallest number must fit. Raises PlanError when the cluster can never hold so many
    workers, ClusterError when they have not fitted within the spec's `wait`.

    record: records an event: `EventLog.record_event`
    """
    resource, needed = _resource_name(spec), spec.min_workers or spec.workers
    there = count_workers_that_fit(spec)
    if min(there, count_free_workers(spec)) >= needed:
        return
    growth, is_on_one_host = find_growth(), _is_on_one_host(spec)
    bundles = [{resource: float(needed)}] if is_on_one_host else [{resource: 1.0}] * needed
    if there < needed and not growth.can_hold(bundles):
        remedy = f"use workers={there}, or a larger cluster" if there else f"start a cluster with {resource}s"
        where = "the host of the workers, which share memory," if is_on_one_host else "the cluster"
        added = f", and its autoscaler may add no more than {growth}" if growth else ""
        raise PlanError("workers", needed, f"{where} has {there} {resource}s{added}", remedy)
    wait_s = spec.wait if spec.wait is not None else NODES_WAIT_S if growth else CAPACITY_WAIT_S
    log, lack = WaitLog(record, wait_s), f"{needed} workers need a {resource} each"
    if growth:
        if not wait_for_nodes(bundles, wait_s, log):
            raise ClusterError(f"{lack}, for which no nodes came within {wait_s:g} s: give it more with wait=1h")
        return
    free = wait_for_resource(resource, needed, min(wait_s, CAPACITY_WAIT_S))
    if free < needed and wait_s > CAPACITY_WAIT_S:
        log.report(f"{lack}, which other work has")
        free = wait_for_resource(resource, needed, wait_s - CAPACITY_WAIT_S)
    if free < needed:
        remedy = "wait for what runs (wait=30m), or end it (`shoal status`), or use fewer workers"
        raise ClusterError(f"{lack}, and {int(free)} of {there} are free: {remedy}")
    log.report("")


def _resource_name(spec: TrainSpec) -> str:
    return "GPU" if spec.device == "cuda" else "CPU"
