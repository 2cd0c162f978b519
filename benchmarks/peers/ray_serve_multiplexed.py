"""Many models on Ray Serve as it is shipped: `@serve.multiplexed`, two replicas.

python -m benchmarks.peers.ray_serve_multiplexed PORT RAY_FOLDER NUM_FIT FOLDER

Weights are in FOLDER. An answer says whether its request found its model loaded. Says `ready`; ends when its input
closes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from starlette.requests import Request

from benchmarks.serving.many_network import Wide, load
from benchmarks.talk import commands, say

NUM_REPLICAS = 2
MAX_ONGOING = 200


def main(port: int, ray_folder: str, num_fit: int, folder: Path) -> None:
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=os.urandom(32).hex(), RAY_ENABLE_UV_RUN_RUNTIME_ENV="0")
    import ray
    from ray import serve

    class Inference:
        def __init__(self) -> None:
            torch.set_num_threads(1)
            self._loading: set[str] = set()
            self._num_loads = 0

        @serve.multiplexed(max_num_models_per_replica=num_fit // NUM_REPLICAS)
        async def get_model(self, name: str) -> Wide:
            self._loading.add(name)
            self._num_loads += 1
            try:
                return await asyncio.to_thread(load, folder, name)
            finally:
                self._loading.discard(name)

        async def __call__(self, request: Request) -> dict[str, Any]:
            name, before = serve.get_multiplexed_model_id(), self._num_loads
            was_loading = name in self._loading
            model = await self.get_model(name)
            is_hit = not was_loading and self._num_loads == before
            with torch.inference_mode():
                y = model(torch.tensor(json.loads(await request.body())["x"]))
            return {"y": y.tolist(), "hit": is_hit}

    ray.init(_temp_dir=ray_folder, _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    options = {
        "max_ongoing_requests": MAX_ONGOING,
        "num_replicas": NUM_REPLICAS,
        "ray_actor_options": {"num_cpus": 0.1},
    }
    serve.run(serve.deployment(Inference).options(**options).bind(), name="model", route_prefix="/")
    say(ready=True)
    for _ in commands():
        pass
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
