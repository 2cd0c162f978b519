"""The same model on Ray Serve as it is shipped: its own ingress, `@serve.batch` with a window of 5 ms.

python -m benchmarks.peers.ray_serve_mlp PORT FOLDER

Ray is one of its own, with its files in FOLDER. Says `ready`; ends when its input closes.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from starlette.requests import Request

from benchmarks.model import answer_of, mlp
from benchmarks.talk import commands, say

MAX_BATCH = 64
WINDOW_S = 0.005
MAX_ONGOING = 400  # the default of 5 would keep batches from forming


def main(port: int, folder: str) -> None:
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=os.urandom(32).hex(), RAY_ENABLE_UV_RUN_RUNTIME_ENV="0")
    import ray
    from ray import serve

    class Inference:
        def __init__(self) -> None:
            torch.set_num_threads(1)
            self.model = mlp()

        @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=WINDOW_S)
        async def infer(self, inputs: list[list[float]]) -> list[list[float]]:
            with torch.inference_mode():
                rows: list[list[float]] = self.model(torch.tensor(inputs)).tolist()
            return rows

        async def __call__(self, request: Request) -> dict[str, Any]:
            body = await request.json()
            return answer_of(await self.infer(body["inputs"][0]["data"]))

    ray.init(_temp_dir=folder, _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deployment = serve.deployment(Inference).options(max_ongoing_requests=MAX_ONGOING)
    serve.run(deployment.bind(), name="mlp", route_prefix="/")
    say(ready=True)
    for _ in commands():
        pass
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
