"""The controller as a Ray actor that outlives its creator and restarts when it dies, and the replicas' client of it.

Its behaviour is in `controller.service`. A client starts the actor when there is none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from shoal.cluster.capacity import make_head_affinity
from shoal.errors import ConnectionLost, ShoalError
from shoal.serve.controller.admin_api import LOAD_TIMEOUT_S
from shoal.serve.controller.config import ControllerConfig
from shoal.serve.controller.service import ControllerService
from shoal.serve.controller.state import StateFile
from shoal.serve.messages.desired_state import EndpointPlan
from shoal.serve.messages.replica_report import ReplicaReport
from shoal.weights import WeightSnapshot

NAMESPACE = "shoal"
CALL_TIMEOUT_S = 10.0
CHANGE_TIMEOUT_S = 3700.0  # above a change's largest timeout
logger = logging.getLogger(__name__)


@ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=1000)
class ControllerWorker(ControllerService):
    """ControllerService as an actor."""

    def on_idle(self) -> None:
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def stop_controller(name: str) -> None:
    """End the actor of this name, if there is one, and remove its state. Idempotent."""
    try:
        actor = ray.get_actor(name, NAMESPACE)
    except ValueError:
        return
    with suppress(RayActorError, GetTimeoutError):
        ray.get(actor.forget.remote(), timeout=CALL_TIMEOUT_S)
    ray.kill(actor, no_restart=True)


class RayControllerClient:
    """The client of the replicas and the driver: implements `ControllerClient`. Can be pickled; starts the actor when
    there is none."""

    def __init__(self, setting: ControllerConfig) -> None:
        self._config = setting
        self._handle: Any = None
        self._last_problem = ""  # its last error

    def __reduce__(self) -> tuple[object, ...]:
        return (RayControllerClient, (self._config,))

    @property
    def handle(self) -> Any:
        if self._handle is None:
            self._handle = ControllerWorker.options(  # type: ignore[attr-defined]
                name=self._config.actor_name,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                scheduling_strategy=make_head_affinity(),  # with HAProxy and the state file
            ).remote(self._config)
        return self._handle

    def start(self) -> None:
        """Start the actor before its first use."""
        _ = self.handle

    async def follow(self, replica: str, known_generation: int, timeout_s: float) -> EndpointPlan | None:
        return await self._call_retryable("follow", replica, known_generation, timeout_s)

    async def report(self, report: ReplicaReport) -> list[ReplicaReport]:
        return await self._call_retryable("report", report)

    async def leave(self, replica: str) -> None:
        await self._call_retryable("leave", replica)

    async def store_weights(self, model: str, snapshot: WeightSnapshot) -> None:
        await self._call_retryable("store_weights", model, snapshot)

    async def fetch_weights(self, model: str, version: int) -> WeightSnapshot | None:
        return await self._call_retryable("fetch_weights", model, version)

    async def administer(self, change: Mapping[str, Any], by: str) -> dict[str, Any]:
        return await self._call("administer", dict(change), by, timeout_s=CHANGE_TIMEOUT_S)

    async def load(self, name: str, parameters: Mapping[str, Any], by: str) -> None:
        await self._call("load", name, dict(parameters), by, timeout_s=LOAD_TIMEOUT_S + CALL_TIMEOUT_S)

    async def unload(self, name: str, by: str) -> None:
        await self._call("unload", name, by, timeout_s=LOAD_TIMEOUT_S)

    async def status(self) -> dict[str, Any]:
        return await self._call("status")

    def call_blocking(self, method: str, *arguments: object) -> Any:
        """Call from a thread without an event loop. Raises ConnectionLost, or the controller's error."""
        try:
            return ray.get(getattr(self.handle, method).remote(*arguments), timeout=CALL_TIMEOUT_S)
        except (RayActorError, GetTimeoutError, RayTaskError) as error:
            raise self._translate_error(error) from error

    def stop(self) -> None:
        """End the actor, if there is one, and remove its state. Idempotent."""
        StateFile(self._config.state_file).remove()
        stop_controller(self._config.actor_name)

    async def _call_retryable(self, method: str, *arguments: object) -> Any:
        """Call for a replica's background task: it retries after any failure of the controller, as long as the replica
        lives."""
        try:
            return await self._call(method, *arguments)
        except RayTaskError as error:
            problem = f"the controller of {self._config.name!r} failed: {error.cause!r}"
            if problem != self._last_problem:  # it would repeat with every report
                self._last_problem = problem
                logger.exception("%s", problem)
            raise ConnectionLost(problem) from error

    async def _call(self, method: str, *arguments: object, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await getattr(self.handle, method).remote(*arguments)
        except (RayActorError, RayTaskError, TimeoutError) as error:
            raise self._translate_error(error) from error

    def _translate_error(self, error: Exception) -> Exception:
        if isinstance(error, RayTaskError):
            return error.cause if isinstance(error.cause, ShoalError) else error
        if isinstance(error, ray.exceptions.ActorDiedError):
            self._handle = None  # it ended for good, idle or by mistake: the next call starts another
        return ConnectionLost(f"the controller of {self._config.name!r} did not answer: {error}")
