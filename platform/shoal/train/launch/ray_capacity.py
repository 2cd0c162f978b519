"""The capacity of the cluster for a run's workers: total, free, and whether the workers have been placed.

Called by the flow before and during an attempt.
"""

from __future__ import annotations

from collections.abc import Callable

import ray
from ray.util.placement_group import placement_group_table

from shoal.cluster.admission import RunAdmission
from shoal.cluster.growth import Bundle, find_growth
from shoal.errors import PlanError
from shoal.parallel.layers.precision import check_precision
from shoal.train.spec import TrainSpec


def resolve_device(spec: TrainSpec) -> TrainSpec:
    """The spec with its device chosen: `auto` becomes CUDA if there is a GPU for each worker (a range: for the fewest).

    Raises PlanError when the workers' device cannot train in `parallel.precision`.
    """
    if spec.device == "auto":
        has_gpus = spec.applied_sync.admits_cuda and _count_workers(spec, "GPU") >= _count_needed(spec)
        spec = spec.model_copy(update={"device": "cuda" if has_gpus else "cpu"})
    check_precision(spec.parallel.precision, spec.device)
    return spec


def count_workers_that_fit(spec: TrainSpec) -> int:
    """How many workers fit on the present hosts when they are empty."""
    return _count_workers(spec, _resource_name(spec))


def _count_workers(spec: TrainSpec, resource: str) -> int:
    """That the cluster holds; where they share memory, that its largest host holds. A lane has a CPU."""
    if not _is_on_one_host(spec):
        return int(ray.cluster_resources().get(resource, 0))
    return _get_largest_host(resource) // spec.applied_sync.num_lanes


def _is_on_one_host(spec: TrainSpec) -> bool:
    return spec.applied_sync.shares_memory or spec.applied_sync.num_lanes > 1


def _get_largest_host(resource: str) -> int:
    return max(int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"])


def _count_needed(spec: TrainSpec) -> int:
    return spec.min_workers or spec.workers


def count_free_workers(spec: TrainSpec) -> int:
    """How many workers fit now, alongside running work."""
    return int(ray.available_resources().get(_resource_name(spec), 0)) // spec.applied_sync.num_lanes


class WorkerPlacement:
    """The placement group of one attempt's workers. Ray Train creates it anew each minute until it is placed.

    It has no name: it is recognised by the driver's job id at its id's end, and by its creation after this object.
    """

    def __init__(self) -> None:
        self._job = str(ray.get_runtime_context().get_job_id())
        self._earlier = set(self._get_states())

    def get_state(self) -> str:
        """PENDING or CREATED, in Ray's terms; "" while there is none."""
        states = [state for name, state in self._get_states().items() if name not in self._earlier]
        return next((state for state in ("CREATED", "PENDING") if state in states), "")

    def _get_states(self) -> dict[str, str]:
        return {name: each["state"] for name, each in placement_group_table().items() if name.endswith(self._job)}


def require_possible(spec: TrainSpec) -> list[Bundle]:
    """What the run's workers reserve, of a range the smallest number. Raises PlanError when the cluster can never hold
    it, with all nodes that an autoscaler may add."""
    resource = _resource_name(spec)
    needed = _count_needed(spec)
    lanes = spec.applied_sync.num_lanes
    there, is_on_one = count_workers_that_fit(spec), _is_on_one_host(spec)
    bundles: list[Bundle] = [{resource: float(needed * lanes)}] if is_on_one else [{resource: 1.0}] * needed
    if there >= needed or (growth := find_growth()).can_hold(bundles):
        return bundles
    added = f", and its autoscaler may add no more than {growth}" if growth else ""
    if is_on_one:
        raise _explain_one_host(spec, resource, added)
    remedy = f"use workers={there}, or a larger cluster" if there else f"start a cluster with {resource}s"
    raise PlanError("workers", needed, f"the cluster has {there} {resource}s{added}", remedy)


def require_capacity(spec: TrainSpec, record: Callable[..., None], admission: RunAdmission) -> None:
    """Wait until the workers fit and it is the run's turn: for nodes that an autoscaler adds, or for other work to end.

    Raises PlanError as `require_possible`, NoCapacity when they have not fitted within the spec's `wait`.

    record: records an event: `EventLog.record_event`
    """
    bundles = require_possible(spec)
    lanes = spec.applied_sync.num_lanes
    needed = _count_needed(spec)
    resource = _resource_name(spec)
    each = f"{lanes} {resource}s" if lanes > 1 else f"a {resource}"
    need = f"{needed} workers need {each} each" if needed > 1 else f"a worker needs {each}"
    admission.wait(bundles, need, spec.wait, record)


def _explain_one_host(spec: TrainSpec, resource: str, added: str) -> PlanError:
    """Workers, or lanes, that share memory are more than any host holds."""
    there, lanes = _get_largest_host(resource), spec.applied_sync.num_lanes
    problem = f"share the memory of one host, and the largest has {there} {resource}s{added}"
    if lanes > 1:
        return PlanError("sync.hogwild", lanes, f"lanes {problem}", f"use sync.hogwild={there}, or a larger host")
    return PlanError("workers", spec.workers, f"workers {problem}", f"use sync.transport=auto, or workers={there}")


def _resource_name(spec: TrainSpec) -> str:
    return "GPU" if spec.device == "cuda" else "CPU"
