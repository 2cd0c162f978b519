"""An endpoint that sleeps, and plain Ray Serve's deployment of the same model that does, for `from_zero`.

    python -m benchmarks.serving.sleepers WORKLOAD

Both are applications of one cluster, so they have the same machine, the same forked workers with torch imported, and
the same ingress. Says their URLs and the file of Serve's log once both have answered and sleep. `{"do": "wait"}` is
answered when neither has a replica. Ends when its input closes.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.talk import commands, say
from shoal.cluster.embedded_cluster import start_cluster

OURS, PEER = "ours", "plain"
IDLE_S = 1.0
SLEEP_S = 120.0


def deploy_ours(workload: str, closing: ExitStack) -> str:
    from benchmarks.serving.workloads import WORKLOADS
    from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
    from shoal.rl.learner import model_arrays
    from shoal.serve.on_ray.deployment import deploy
    from shoal.serve.spec.endpoint import EndpointSpec
    from shoal.serve.spec.model_source import model_from_ref
    from shoal.weights import WeightSnapshot

    load = WORKLOADS[workload]
    x = TensorSignature(name="x", datatype=load.datatype, shape=[-1, *load.shape])
    y = TensorSignature(name="y", datatype="FP32", shape=[-1, *load.out])
    factory = ModelFactory(factory=f"{load.module.__module__}:{load.module.__name__}")
    weights = WeightSnapshot.of(1, model_arrays(load.module()))
    Registry().register(OURS, weights, model=factory, signature=Signature(inputs=[x], outputs=[y]))
    scale = {"min": 0, "max": 1, "idle_s": IDLE_S}
    endpoint = deploy(EndpointSpec.parse({"name": OURS, "num_cpus": 0.1, "scale": scale}), [model_from_ref(OURS)])
    closing.callback(endpoint.close)
    return endpoint.url


def deploy_plain(workload: str) -> None:
    """Raises RuntimeError when it does not start."""
    from ray import serve
    from starlette.requests import Request

    from shoal.cluster.ingress.serve_environment import hold_while_asleep

    class Plain:
        def __init__(self) -> None:
            from benchmarks.serving.workloads import Forward

            self._infer = Forward(workload)

        async def __call__(self, request: Request) -> dict[str, Any]:
            from benchmarks.serving.workloads import answer_of, decode

            return answer_of(self._infer([decode(workload, await request.body())])[0])

    hold_while_asleep(os.environ, PEER, is_on=True)
    scaling = {"min_replicas": 0, "initial_replicas": 1, "max_replicas": 1, "metrics_interval_s": 0.5}
    scaling |= {"look_back_period_s": IDLE_S, "downscale_delay_s": IDLE_S, "downscale_to_zero_delay_s": IDLE_S}
    deployment = serve.deployment(Plain).options(
        name="replica", autoscaling_config=scaling, ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=100
    )
    serve.run(deployment.bind(), name=PEER, route_prefix=f"/{PEER}")


def wait_asleep() -> None:
    """Raises TimeoutError."""
    from ray import serve

    ends_s = time.monotonic() + SLEEP_S
    while any(serve.status().applications[name].deployments["replica"].replica_states for name in (OURS, PEER)):
        if time.monotonic() > ends_s:
            raise TimeoutError(f"a replica is still there after {SLEEP_S:g} s")
        time.sleep(0.1)


def main(workload: str) -> None:
    with ExitStack() as closing:
        cluster = closing.enter_context(start_cluster(num_cpus=4))
        os.environ.update(cluster.environment)  # before anything imports Ray
        import ray

        from shoal.cluster.job_main import connect

        connect()
        closing.callback(ray.shutdown)
        url = deploy_ours(workload, closing)
        deploy_plain(workload)
        wait_asleep()
        logs = Path(ray.nodes()[0]["ObjectStoreSocketName"]).parents[1] / "logs" / "serve"
        say(ours=f"{url}/v2/models/{OURS}/infer", plain=f"{url}/{PEER}", logs=str(logs))
        for _ in commands():
            wait_asleep()
            say(done=True)


if __name__ == "__main__":
    main(sys.argv[1])
