"""The controller as a Ray actor that outlives its creator and restarts when it dies.

Its behaviour is in `controller.service`. Imported by its own process and by the client that starts it: a replica finds
it, and starts sooner without what only a controller needs.
"""

from __future__ import annotations

from typing import Any

import ray

from shoal.cluster.capacity import make_head_affinity
from shoal.ray_call import NAMESPACE
from shoal.serve.controller.config import ControllerConfig
from shoal.serve.controller.service import ControllerService


@ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=1000)
class ControllerWorker(ControllerService):
    """ControllerService as an actor."""

    def on_idle(self) -> None:
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def start_controller(setting: ControllerConfig) -> Any:
    """The handle of the actor, which is started unless another process has done so."""
    return ControllerWorker.options(  # type: ignore[attr-defined]
        name=setting.actor_name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        scheduling_strategy=make_head_affinity(),  # with HAProxy and the state file
    ).remote(setting)
