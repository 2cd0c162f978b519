"""An endpoint's options for Ray Serve: replicas, their resources and autoscaling.

Called by the Ray shell; the names are Serve's, and nothing here imports it.
"""

from __future__ import annotations

from typing import Any

from shoal.serve.spec.endpoint import EndpointSpec

UPSCALE_DELAY_S = 3.0  # a queue of a second absorbs a burst; a replica's start takes as long
DOWNSCALE_DELAY_S = 60.0
LOOK_BACK_S = 5.0
METRICS_INTERVAL_S = 1.0  # Serve's 10 s would notice a burst after its end


def deployment_options(spec: EndpointSpec) -> dict[str, Any]:
    """The arguments of `Deployment.options`. GPUs are those of the spec, whose default is already resolved."""
    scaling: dict[str, Any] = {"num_replicas": spec.num_replicas}
    if spec.is_autoscaled:
        scaling = {
            "autoscaling_config": {
                "min_replicas": spec.num_replicas,
                "max_replicas": spec.max_replicas,
                "target_ongoing_requests": spec.target_ongoing_requests,
                "upscale_delay_s": UPSCALE_DELAY_S,
                "downscale_delay_s": DOWNSCALE_DELAY_S,
                "look_back_period_s": LOOK_BACK_S,
                "metrics_interval_s": METRICS_INTERVAL_S,
            }
        }
    return dict(
        name="replica",
        max_ongoing_requests=spec.max_ongoing_requests,
        ray_actor_options={"num_cpus": spec.num_cpus, **({"num_gpus": spec.num_gpus} if spec.num_gpus else {})},
        graceful_shutdown_timeout_s=spec.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2.0,
        max_constructor_retry_count=2,
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
        **scaling,
    )
