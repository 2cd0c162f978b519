"""Check the cluster's capacity before starting anything that would wait for it; choose hosts for workers that reserve
nothing; find the head node, for workers that live as long as the cluster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal.cluster.growth import HEAD, Bundle, Growth, describe_launches, find_growth
from shoal.errors import ConfigError
from shoal.runs.event_messages import WAITING

POLL_S = 0.05
GPU_GRAINS = 10_000  # Ray counts resources in these parts
NODES_WAIT_S = 1800.0  # the default wait where an autoscaler may add nodes; a machine of a cloud takes minutes


def require_cpus(num_cpus: float, fields: str, bundles: Sequence[Bundle] = ()) -> bool:
    """Whether an autoscaler must add nodes first. Raise ConfigError when the cluster as a whole has fewer CPUs than
    `num_cpus`, and no nodes may come for the bundles: Ray would wait without end.

    fields:  what the error asks to lower: `endpoint.num_cpus or endpoint.num_replicas`
    bundles: what each worker needs
    """
    total = float(ray.cluster_resources().get("CPU", 0.0))
    if num_cpus <= total:
        return False
    growth = find_growth()
    if not growth.can_hold(bundles):
        remedy = f"lower {fields}, or use a larger cluster"
        raise ConfigError("num_cpus", num_cpus, f"is more than the {total:g} of the cluster{_but_for(growth)}", remedy)
    return True


def require_gpus(num_gpus: float, count: int, fields: str, bundle: Bundle | None = None) -> None:
    """Raise ConfigError when the cluster cannot hold `count` workers with `num_gpus` each, and no nodes may come for
    them: Ray would wait without end.

    fields: what the error asks to lower
    bundle: what each worker needs, if it may wait for nodes that an autoscaler adds
    """
    by_host = gpus_by_host()
    places = count_gpu_slots(num_gpus, by_host) if num_gpus else count
    if places >= count:
        return
    growth = Growth({}) if bundle is None else find_growth()
    if bundle is None or not growth.can_hold([bundle] * count):
        there = f"the cluster has {sum(by_host):g} GPUs, which is room for {places} of {count} workers"
        remedy = f"lower {fields}, or use a larger cluster"
        raise ConfigError("num_gpus", num_gpus, f"{there}{_but_for(growth)}", remedy)


def _but_for(growth: Growth) -> str:
    return f", and its autoscaler may add no more than {growth}" if growth else ""


def gpus_by_host() -> list[float]:
    """The number of GPUs of each host."""
    return [float(node["Resources"].get("GPU", 0.0)) for node in ray.nodes() if node["Alive"]]


def gpus_by_possible_host() -> list[float]:
    """The number of GPUs of each host; where there is none, of each that an autoscaler may add."""
    present = gpus_by_host()
    return present if any(present) else [*present, *find_growth().list_hosts("GPU")]


def count_gpu_slots(num_gpus: float, by_host: Sequence[float]) -> int:
    """How many workers fit that need `num_gpus` (above 0) each. A fraction must come from one GPU."""
    if num_gpus < 1:
        return sum(int(gpus) for gpus in by_host) * math.floor(1 / num_gpus)
    return sum(int(gpus / num_gpus) for gpus in by_host)


def gpu_share(count: int, by_host: Sequence[float]) -> float:
    """The even share of the GPUs for each of `count` workers: at most 1, and 0 without GPUs."""
    total = sum(int(gpus) for gpus in by_host)
    if total == 0:
        return 0.0
    return math.floor(GPU_GRAINS / math.ceil(count / total)) / GPU_GRAINS


def get_head_address() -> str:
    """The head node's address for the other hosts."""
    return str(_find_head_node()["NodeManagerAddress"])


def get_head_id() -> str:
    """The head node's id."""
    return str(_find_head_node()["NodeID"])


def get_node_address(node_id: str) -> str:
    """The address of a node for the other hosts."""
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == node_id)


def list_other_nodes() -> dict[str, str]:
    """The address of each node that is up, but for the head, by its id."""
    head = get_head_id()
    return {
        node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != head
    }


def choose_host(nodes: Sequence[Mapping[str, Any]], here: str) -> str:
    """The id of this node if it has CPUs, otherwise of the one with the most; this one where none has any.
    Totals count, and not what is free.

    nodes: as `ray.nodes()` has them
    here:  this node's id
    """
    sizes = {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in nodes if node["Alive"]}
    return here if sizes.get(here) or not sizes else max(sizes, key=lambda node: (sizes[node], node == here))


def make_host_options() -> dict[str, Any]:
    """Ray's options that place a worker that reserves no CPU where there are some: a head may have none.
    It is on that node while the node is up, and on another once it is lost.
    """
    here = str(ray.get_runtime_context().get_node_id())
    there = NodeAffinitySchedulingStrategy(choose_host(ray.nodes(), here), soft=True)
    # An actor that asks for nothing is placed at random (Ray 2.60, `GetBestSchedulableNode`): it asks for a byte.
    return {"num_cpus": 0, "memory": 1, "scheduling_strategy": there}


def _find_head_node() -> dict[str, Any]:
    return next(node for node in ray.nodes() if node["Alive"] and HEAD in node["Resources"])


def wait_for_resource(resource: str, amount: float, wait_s: float) -> float:
    """Wait until `amount` of `resource` ("CPU", "GPU") is free, at most `wait_s` seconds; return the free amount.

    Waiting also helps after work has ended: Ray reports its freed resources up to a tenth of a second later.
    """
    deadline = time.monotonic() + wait_s
    while (free := ray.available_resources().get(resource, 0.0)) < amount and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return float(free)


class WaitLog:
    """Records why something waits for capacity, whenever the reason changes, and the end of the wait.

    record: records an event: `RunRecorder.record_event`
    wait_s: how long it may wait; None: without limit
    """

    def __init__(self, record: Callable[..., None], wait_s: float | None = None) -> None:
        self._record = record
        self._wait_s = wait_s
        self._reason = ""
        self._main: object = None
        self._reported_at = -math.inf

    def report(self, reason: str, every_s: float = 0.0, main: object = None, **details: object) -> None:
        """reason:  "" when it has its places
        every_s:  between two reasons whose main part is the same
        details:  of the event, besides
        """
        is_due = not reason or main != self._main or time.monotonic() - self._reported_at >= every_s
        if reason != self._reason and is_due:
            self._reason = reason
            self._main = main
            self._reported_at = time.monotonic()
            self._record(WAITING, reason=reason, wait_s=self._wait_s, **details)


def describe_wait() -> str:
    """Why what waits for nodes does."""
    launches = describe_launches()
    return f"waiting for nodes{': ' + launches if launches else ''}"
