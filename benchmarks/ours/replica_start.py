"""A replica of an endpoint as a process, without Ray: its start is measured by `benchmarks.export_start`.

    python -m benchmarks.ours.replica_start MODEL [OPTIONS]

OPTIONS is JSON for the model. Says its URL once it serves the registered model; ends with SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any

import uvicorn
import uvloop

from benchmarks.local_controller import LocalController
from benchmarks.talk import say
from shoal.registry import Registry
from shoal.serve.controller.controller import EndpointController
from shoal.serve.controller.state import Deployment
from shoal.serve.http import fast_path
from shoal.serve.replica.replica import EndpointReplica
from shoal.serve.spec.endpoint import EndpointSpec


async def serve(model: str, settings: dict[str, Any]) -> None:
    spec = EndpointSpec.parse({"name": "endpoint", "model": settings})
    options = spec.options(model).model_dump(mode="json")
    deployment = Deployment(model, Registry().location, "", options)
    controller = EndpointController("endpoint", [deployment], lease_s=600.0)
    replica = EndpointReplica("r1", spec, {}, LocalController(controller))
    ticking = asyncio.create_task(tick(controller, replica))
    fast_path.install_application(replica.app)
    server = uvicorn.Server(uvicorn.Config(replica.app, log_level="error", lifespan="off", ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await replica.start(60.0)
        say(url=f"http://127.0.0.1:{listener.getsockname()[1]}/v2/models/{model}/infer")
        await server.serve(sockets=[listener])
    ticking.cancel()
    await replica.close()


async def tick(controller: EndpointController, replica: EndpointReplica) -> None:
    """Quickly while it starts; then the processor is the replica's, as beside a controller in another process."""
    while True:
        controller.tick()
        await asyncio.sleep(0.5 if replica.manager.is_ready else 0.02)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}))  # as Ray's actors do
