"""Check the cluster's capacity before starting anything that would wait for it; find the head node, for workers that
live as long as the cluster."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal.errors import ConfigError

POLL_S = 0.05
GPU_GRAINS = 10_000  # Ray counts resources in these parts
_HEAD = "node:__internal_head__"  # the resource by which Ray marks it


def require_cpus(num_cpus: float, fields: str) -> None:
    """Raise ConfigError when the cluster as a whole has fewer CPUs than `num_cpus`: Ray would wait for ever.

    fields: what the error asks to lower: `endpoint.num_cpus or endpoint.num_replicas`
    """
    total = float(ray.cluster_resources().get("CPU", 0.0))
    if num_cpus > total:
        remedy = f"lower {fields}, or use a larger cluster"
        raise ConfigError("num_cpus", num_cpus, f"is more than the {total:g} of the cluster", remedy)


def require_gpus(num_gpus: float, count: int, fields: str) -> None:
    """Raise ConfigError when the cluster cannot hold `count` workers with `num_gpus` each: Ray would wait for ever.

    fields: what the error asks to lower
    """
    by_host = gpus_by_host()
    places = count_gpu_slots(num_gpus, by_host) if num_gpus else count
    if places < count:
        there = f"the cluster has {sum(by_host):g} GPUs, which is room for {places} of {count} workers"
        raise ConfigError("num_gpus", num_gpus, there, f"lower {fields}, or use a larger cluster")


def gpus_by_host() -> list[float]:
    """The number of GPUs of each host."""
    return [float(node["Resources"].get("GPU", 0.0)) for node in ray.nodes() if node["Alive"]]


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


def make_head_affinity() -> NodeAffinitySchedulingStrategy:
    """Place a worker on the head node, so that it outlives every other host. Ray would choose any."""
    return NodeAffinitySchedulingStrategy(_find_head_node()["NodeID"], soft=False)


def _find_head_node() -> dict[str, Any]:
    return next(node for node in ray.nodes() if node["Alive"] and _HEAD in node["Resources"])


def wait_for_resource(resource: str, amount: float, wait_s: float) -> float:
    """Wait until `amount` of `resource` ("CPU", "GPU") is free, at most `wait_s` seconds; return the free amount.

    Waiting also helps after work has ended: Ray reports its freed resources up to a tenth of a second later.
    """
    deadline = time.monotonic() + wait_s
    while (free := ray.available_resources().get(resource, 0.0)) < amount and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return float(free)
