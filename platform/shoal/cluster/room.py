"""Whether the cluster is large enough, and has room now: asked before anything is started that would wait for it."""

from __future__ import annotations

import time

import ray

from shoal.errors import ConfigError

POLL_S = 0.05


def require_cpus(num_cpus: float, fields: str) -> None:
    """Raise ConfigError when the cluster as a whole has fewer CPUs than `num_cpus`: Ray would wait for ever.

    fields: what to lower then, in words: `endpoint.num_cpus or endpoint.num_replicas`
    """
    total = float(ray.cluster_resources().get("CPU", 0.0))
    if num_cpus > total:
        remedy = f"lower {fields}, or use a larger cluster"
        raise ConfigError("num_cpus", num_cpus, f"is more than the {total:g} of the cluster", remedy)


def wait_for_free(resource: str, amount: float, wait_s: float) -> float:
    """How much of `resource` ("CPU", "GPU") is free, as soon as `amount` is, and at the latest after `wait_s` seconds.

    Also what has just ended is worth a wait: Ray tells up to a tenth of a second later that its place is free.
    """
    deadline = time.monotonic() + wait_s
    while (free := ray.available_resources().get(resource, 0.0)) < amount and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return float(free)
