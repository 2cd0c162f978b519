"""A model on Ray Serve as it is shipped: its own ingress, `@serve.batch` with a window of 5 ms.

python -m benchmarks.peers.ray_serve_server PORT FOLDER    # BENCH_WORKLOAD names the model

Ray is one of its own, with its files in FOLDER. Says `ready`; ends when its input closes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import numpy as np
from starlette.requests import Request

from benchmarks.serving.workloads import WORKLOADS, Forward, answer_of, decode
from benchmarks.talk import commands, say

WINDOW_S = 0.005
MAX_ONGOING = 2000  # the default of 5 would keep batches from forming


def main(port: int, folder: str) -> None:
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=os.urandom(32).hex(), RAY_ENABLE_UV_RUN_RUNTIME_ENV="0")
    import ray
    from ray import serve

    name = os.environ["BENCH_WORKLOAD"]
    load = WORKLOADS[name]

    class Inference:
        def __init__(self) -> None:
            self._infer = Forward(name)

        @serve.batch(max_batch_size=load.max_batch, batch_wait_timeout_s=WINDOW_S)
        async def infer(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
            if load.off_processor:
                return await asyncio.to_thread(self._infer, inputs)
            return self._infer(inputs)

        async def __call__(self, request: Request) -> dict[str, Any]:
            return answer_of(await self.infer(decode(name, await request.body())))

    ray.init(_temp_dir=folder, _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deployment = serve.deployment(Inference).options(max_ongoing_requests=MAX_ONGOING)
    serve.run(deployment.bind(), name="model", route_prefix="/")
    say(ready=True)
    for _ in commands():
        pass
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
