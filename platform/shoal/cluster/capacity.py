"""Whether the cluster is large enough, and has room now: asked before anything is started that would wait for it. And
which of its hosts is the head, for what is to live as long as the cluster."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal.errors import ConfigError

POLL_S = 0.05
_HEAD = "node:__internal_head__"  # the resource by which Ray marks it


def require_cpus(num_cpus: float, fields: str) -> None:
    """Raise ConfigError when the cluster as a whole has fewer CPUs than `num_cpus`: Ray would wait for ever.

    fields: what to lower then, in words: `endpoint.num_cpus or endpoint.num_replicas`
    """
    total = float(ray.cluster_resources().get("CPU", 0.0))
    if num_cpus > total:
        remedy = f"lower {fields}, or use a larger cluster"
        raise ConfigError("num_cpus", num_cpus, f"is more than the {total:g} of the cluster", remedy)


def get_head_address() -> str:
    """By which the other hosts reach it."""
    return str(_find_head_node()["NodeManagerAddress"])


def make_head_affinity() -> NodeAffinitySchedulingStrategy:
    """For a worker that is to outlive every other host: of several, Ray would choose any."""
    return NodeAffinitySchedulingStrategy(_find_head_node()["NodeID"], soft=False)


def _find_head_node() -> dict[str, Any]:
    return next(node for node in ray.nodes() if node["Alive"] and _HEAD in node["Resources"])


def wait_for_resource(resource: str, amount: float, wait_s: float) -> float:
    """How much of `resource` ("CPU", "GPU") is free, as soon as `amount` is, and at the latest after `wait_s` seconds.

    Also what has just ended is worth a wait: Ray tells up to a tenth of a second later that its place is free.
    """
    deadline = time.monotonic() + wait_s
    while (free := ray.available_resources().get(resource, 0.0)) < amount and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return float(free)
