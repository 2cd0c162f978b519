"""An endpoint's options for Ray Serve: replicas, their resources and autoscaling.

Called by the Ray shell; the names are Serve's, and nothing here imports it.
"""

from __future__ import annotations

from typing import Any

from shoal.home import home
from shoal.serve.spec.endpoint import EndpointSpec

POLICY = "shoal.serve.on_ray.autoscaling:EndpointAutoscaler"
METRICS_INTERVAL_S = 0.5  # Serve's 10 s would notice a burst after its end
LOOK_BACK_S = 2.5  # of which a replica's figures are taken five times


def worker_bundles(spec: EndpointSpec) -> list[dict[str, float]]:
    """What each worker of a replica needs, or the replica that is one."""
    return [{"CPU": spec.num_cpus, **({"GPU": spec.num_gpus} if spec.num_gpus else {})}] * spec.num_workers


def deployment_options(spec: EndpointSpec) -> dict[str, Any]:
    """The arguments of `Deployment.options`. GPUs are those of the spec, whose default is already resolved."""
    scaling: dict[str, Any] = {"num_replicas": spec.num_replicas}
    if spec.scale is not None:
        scale = spec.scale.model_dump(mode="json")
        spent_file = str(home() / "endpoints" / f"{spec.name}.budget.json")
        scaling = {
            "autoscaling_config": {
                "min_replicas": spec.scale.min,
                "initial_replicas": max(1, spec.scale.min),  # a deployment is ready when its models have answered
                "max_replicas": spec.scale.max,
                # The policy has its own windows.
                "upscale_delay_s": 0.0,
                "downscale_delay_s": 0.0,
                "downscale_to_zero_delay_s": 0.0,
                "look_back_period_s": LOOK_BACK_S,
                "metrics_interval_s": METRICS_INTERVAL_S,
                "policy": {
                    "policy_function": POLICY,
                    "policy_kwargs": {"scale": scale, "objective_s": spec.objective_s, "spent_file": spent_file},
                },
            }
        }
    resources = {"num_cpus": spec.num_cpus, **({"num_gpus": spec.num_gpus} if spec.num_gpus else {})}
    if spec.num_workers > 1:  # the replica itself, which computes nothing, lies with the first of its workers
        resources = {"num_cpus": 0.0}
        scaling["placement_group_bundles"] = worker_bundles(spec)
    return dict(
        name="replica",
        max_ongoing_requests=spec.max_ongoing_requests,
        ray_actor_options=resources,
        graceful_shutdown_timeout_s=spec.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2.0,
        max_constructor_retry_count=2,
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
        **scaling,
    )
