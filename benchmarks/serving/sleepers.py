"""An endpoint that sleeps, and plain Ray Serve's deployment of the same model that does, for `from_zero`.

    python -m benchmarks.serving.sleepers ours|stock FOLDER WORKLOAD

`ours` is an endpoint on our cluster, with a plain deployment beside it: that has the same forked workers with torch
imported, the same settings of Serve and the same ingress. `stock` is a plain deployment on Ray's own cluster, as
shipped, with its files in FOLDER. Says URLs and the folder of Serve's log once all sleep. `{"do": "wait"}` is answered
when no replica is there. Ends when its input closes.
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

OURS, PLAIN, STOCK = "ours", "plain", "stock"
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


def deploy_plain(name: str, workload: str) -> None:
    """Raises RuntimeError when it does not start."""
    from ray import serve
    from starlette.requests import Request

    class Plain:
        def __init__(self) -> None:
            from benchmarks.serving.workloads import Forward

            self._infer = Forward(workload)

        async def __call__(self, request: Request) -> dict[str, Any]:
            from benchmarks.serving.workloads import answer_of, decode

            return answer_of(self._infer([decode(workload, await request.body())])[0])

    scaling = {"min_replicas": 0, "initial_replicas": 1, "max_replicas": 1, "metrics_interval_s": 0.5}
    scaling |= {"look_back_period_s": IDLE_S, "downscale_delay_s": IDLE_S, "downscale_to_zero_delay_s": IDLE_S}
    deployment = serve.deployment(Plain).options(
        name="replica", autoscaling_config=scaling, ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=100
    )
    serve.run(deployment.bind(), name=name, route_prefix=f"/{name}")


def wait_asleep() -> None:
    """Raises TimeoutError."""
    from ray import serve

    ends_s = time.monotonic() + SLEEP_S
    while any(each.deployments["replica"].replica_states for each in serve.status().applications.values()):
        if time.monotonic() > ends_s:
            raise TimeoutError(f"a replica is still there after {SLEEP_S:g} s")
        time.sleep(0.1)


def start_ours(workload: str, closing: ExitStack) -> dict[str, str]:
    cluster = closing.enter_context(start_cluster(num_cpus=4))
    os.environ.update(cluster.environment)  # before anything imports Ray
    import ray

    from shoal.cluster.ingress.serve_environment import hold_while_asleep
    from shoal.cluster.job_main import connect

    connect()
    closing.callback(ray.shutdown)
    url = deploy_ours(workload, closing)
    hold_while_asleep(os.environ, PLAIN, is_on=True)
    deploy_plain(PLAIN, workload)
    return {OURS: f"{url}/v2/models/{OURS}/infer", PLAIN: f"{url}/{PLAIN}"}


def start_stock(folder: str, workload: str, closing: ExitStack) -> dict[str, str]:
    from shoal.cluster.ports import find_free_port

    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=os.urandom(32).hex(), RAY_ENABLE_UV_RUN_RUNTIME_ENV="0")
    import ray
    from ray import serve

    ray.init(num_cpus=4, _temp_dir=folder, _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False)
    closing.callback(ray.shutdown)
    port = find_free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    closing.callback(serve.shutdown)
    deploy_plain(STOCK, workload)
    return {STOCK: f"http://127.0.0.1:{port}/{STOCK}"}


def main(kind: str, folder: str, workload: str) -> None:
    with ExitStack() as closing:
        started = start_ours(workload, closing) if kind == OURS else start_stock(folder, workload, closing)
        import ray

        wait_asleep()
        logs = Path(ray.nodes()[0]["ObjectStoreSocketName"]).parents[1] / "logs" / "serve"
        say(logs=str(logs), **started)
        for _ in commands():
            wait_asleep()
            say(done=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
