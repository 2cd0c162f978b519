"""Whether the cluster is large enough, asked before anything is started that would wait for it. Called by flows."""

from __future__ import annotations

import ray

from shoal.errors import ConfigError


def require_cpus(num_cpus: float, fields: str) -> None:
    """Raise ConfigError when the cluster as a whole has fewer CPUs than `num_cpus`: Ray would wait for ever.

    fields: what to lower then, in words: `endpoint.num_cpus or endpoint.num_replicas`
    """
    total = float(ray.cluster_resources().get("CPU", 0.0))
    if num_cpus > total:
        remedy = f"lower {fields}, or use a larger cluster"
        raise ConfigError("num_cpus", num_cpus, f"is more than the {total:g} of the cluster", remedy)
