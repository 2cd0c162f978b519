"""An endpoint whose replicas are added and removed on request, ours or plain Ray Serve's, for `scale_events`.

    python -m benchmarks.serving.scaled ours|peer FOLDER START ANSWER_S [HOST]

Its model waits `ANSWER_S` before each answer, and none is made while the file START is there. The peer is Ray Serve
with its own HAProxy, as shipped; a stream of it is `/stream?NUM`. Says its addresses; answers
`{"do": "scale", "num_replicas": 2}` when so many replicas run. Ends when its input closes.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.talk import commands, say

NAME = "model"
MOST_ROWS = 256


class Waiter(nn.Module):
    """y = x after `answer_s`."""

    def __init__(self, start: str, answer_s: float) -> None:
        super().__init__()
        await_start(start)
        self.answer_s, self.scale = answer_s, nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.answer_s)
        return x * self.scale


def await_start(file: str) -> None:
    while Path(file).exists():
        time.sleep(0.05)


def serve_ours(start: str, answer_s: float, host: str, closing: ExitStack) -> dict[str, str]:
    from shoal.cluster.embedded_cluster import start_cluster

    cluster = closing.enter_context(start_cluster(num_cpus=8))
    os.environ.update(cluster.environment)  # before anything imports Ray
    import numpy as np
    import ray
    from ray import serve

    from shoal.cluster.job_main import connect
    from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
    from shoal.serve.on_ray.deployment import deploy
    from shoal.serve.spec.endpoint import EndpointSpec
    from shoal.serve.spec.model_source import model_from_ref
    from shoal.weights import WeightSnapshot

    connect()
    closing.callback(ray.shutdown)
    factory = ModelFactory(factory=f"{__spec__.name}:Waiter", kwargs={"start": start, "answer_s": answer_s})
    x, y = (TensorSignature(name=name, datatype="FP32", shape=[-1, 1]) for name in "xy")
    weights = WeightSnapshot.of(1, {"scale": np.ones(1, np.float32)})
    Registry().register(NAME, weights, model=factory, signature=Signature(inputs=[x], outputs=[y]))
    serve.RunTarget = functools.partial(serve.RunTarget, external_scaler_enabled=True)  # type: ignore[misc,assignment]
    options = {"max_batch_size": MOST_ROWS}
    spec = EndpointSpec.parse({"name": NAME, "host": host, "grpc_port": 0, "num_cpus": 0.1, "model": options})
    endpoint = deploy(spec, [model_from_ref(NAME)])
    closing.callback(endpoint.close)
    return {"url": f"{endpoint.url}/v2/models/{NAME}/infer", "grpc": endpoint.grpc, "deployment": "replica"}


def serve_peer(folder: str, start: str, answer_s: float, closing: ExitStack) -> dict[str, str]:
    from shoal.cluster.ports import find_free_port

    files = {"CONFIG_FILE_LOC": "haproxy.cfg", "SOCKET_PATH": "a.sock", "METRICS_SOCKET_PATH": "m.sock"}
    files |= {"SERVER_STATE_BASE": "", "SERVER_STATE_FILE": "state"}
    os.environ.update({f"RAY_SERVE_HAPROXY_{name}": f"{folder}/h/{file}" for name, file in files.items()})
    ports = {"HAPROXY_METRICS", "HAPROXY_STATS", "FALLBACK_PROXY_HTTP", "FALLBACK_PROXY_GRPC"}
    os.environ.update({f"RAY_SERVE_{name}_PORT": str(find_free_port()) for name in ports})
    os.environ.update(RAY_SERVE_ENABLE_HA_PROXY="1", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=os.urandom(32).hex())
    import ray
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse

    class Waiting:
        def __init__(self) -> None:
            await_start(start)

        async def __call__(self, request: Request) -> Response:
            if request.url.path == "/stream":
                return StreamingResponse(self.count(int(request.url.query)))
            await request.body()
            await asyncio.sleep(answer_s)
            return Response("{}", media_type="application/json")

        async def count(self, num: int) -> AsyncIterator[str]:
            for number in range(num):
                await asyncio.sleep(answer_s)
                yield f"{number}\n"

    ray.init(num_cpus=8, _temp_dir=f"{folder}/r", _node_ip_address="127.0.0.1", include_dashboard=False)
    closing.callback(ray.shutdown)
    port = find_free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    deployment = serve.deployment(Waiting).options(max_ongoing_requests=2000, ray_actor_options={"num_cpus": 0.1})
    serve.run(deployment.bind(), name=NAME, external_scaler_enabled=True)
    closing.callback(serve.shutdown)
    return {"url": f"http://127.0.0.1:{port}/", "grpc": "", "deployment": "Waiting"}


def scale(deployment: str, num_replicas: int, timeout_s: float = 60.0) -> None:
    """Ask for so many replicas, and wait until they run."""
    import ray
    from ray import serve
    from ray.serve._private.common import DeploymentID
    from ray.serve.context import _get_global_client

    controller: Any = _get_global_client()._controller  # type: ignore[union-attr]
    ray.get(controller.update_deployment_replicas.remote(DeploymentID(deployment, NAME), num_replicas))
    ends_s = time.monotonic() + timeout_s
    while serve.status().applications[NAME].deployments[deployment].replica_states.get("RUNNING") != num_replicas:
        if time.monotonic() > ends_s:
            raise TimeoutError(f"there are not {num_replicas} replicas after {timeout_s:g} s")
        time.sleep(0.05)


def main(kind: str, folder: str, start: str, answer_s: float, host: str = "127.0.0.1") -> None:
    with ExitStack() as closing:
        if kind == "ours":
            served = serve_ours(start, answer_s, host, closing)
        else:
            served = serve_peer(folder, start, answer_s, closing)
        say(**served)
        for command in commands():
            scale(served["deployment"], command["num_replicas"])
            say(done=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), *sys.argv[5:])
