"""The controller as a Ray actor that outlives its maker and comes back when it dies, and the replicas' end of it.

The actor holds plain objects and forwards to them. Whoever needs it makes it when it is not there: its state is a file.
It ends when no replica has asked for a while, as after an endpoint that was removed without a word.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from shoal.errors import ConnectionLost, ShoalError
from shoal.serve.administration import LOAD_TIMEOUT_S, Administration
from shoal.serve.audit import FILE, AuditLog
from shoal.serve.controller import EndpointController
from shoal.serve.controller_state import Deployment, Event, StateFile
from shoal.serve.report import ReplicaReport
from shoal.serve.rollout import EndpointPlan
from shoal.serve.status import StatusBook

NAMESPACE = "shoal"
CALL_TIMEOUT_S = 10.0
CHANGE_TIMEOUT_S = 3700.0  # above what a change may ask for
TICK_S = 0.25
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ControllerSetting:
    """What a controller is made from, whoever makes it.

    deployment: of the call of `deploy`
    folder:     for its state
    registry:   where models that are loaded later come from
    options:    how those are served, by name; "" for all others
    idle_s:     when no replica has asked for so long, there is none any more
    """

    name: str
    deployment: str
    models: tuple[Deployment, ...]
    folder: Path
    registry: str
    options: Mapping[str, dict[str, Any]]
    idle_s: float = 120.0

    @property
    def actor(self) -> str:
        """The actor's name."""
        return f"endpoint-{self.name}-{self.deployment}"


@ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=1000)
class ControllerWorker:
    """An EndpointController, its administration and its status."""

    def __init__(self, setting: ControllerSetting) -> None:
        file = StateFile(setting.folder / f"{setting.name}.json")
        self._audit = AuditLog(setting.folder.parent / FILE, setting.name)
        self._controller = EndpointController(
            setting.name,
            setting.models,
            deployment_id=setting.deployment,
            state_file=file,
            audit=self._audit.changed,
        )
        self._administration = Administration(self._controller, setting.registry, setting.options)
        self._status = StatusBook(self._controller)
        self._running: asyncio.Task[None] | None = None
        self._asked_s, self._idle_s = time.monotonic(), setting.idle_s

    async def follow(self, replica: str, known_generation: int, timeout_s: float) -> EndpointPlan | None:
        self._asked_s = time.monotonic()
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())
        return await self._controller.follow(replica, known_generation, timeout_s)

    async def report(self, report: ReplicaReport) -> list[ReplicaReport]:
        return self._controller.report(report)

    async def leave(self, replica: str) -> None:
        self._controller.leave(replica)

    async def administer(self, change: Mapping[str, Any], by: str) -> dict[str, Any]:
        with self._audit.asked(str(change.get("action", "")), change, by):
            return self._status.model(await self._administration.administer(change, by))

    async def load(self, name: str, parameters: Mapping[str, Any], by: str) -> None:
        with self._audit.asked("load", {"model": name, "parameters": parameters}, by):
            await self._administration.load(name, parameters, by)

    async def unload(self, name: str, by: str) -> None:
        with self._audit.asked("unload", {"model": name}, by):
            await self._administration.unload(name, by)

    async def status(self) -> dict[str, Any]:
        return self._status.endpoint()

    async def events(self, after: int) -> list[Event]:
        return [event for event in self._controller.state.events if event.number > after]

    async def pid(self) -> int:
        return os.getpid()

    async def forget(self) -> None:
        """The endpoint is gone, and its state with it."""
        self._controller.close(forget=True)

    async def _run(self) -> None:
        try:
            while time.monotonic() - self._asked_s < self._idle_s:
                self._controller.tick()
                self._status.sample()
                await asyncio.sleep(TICK_S)
        except Exception:
            logger.exception("the controller of %r failed", self._controller.name)
            os._exit(1)  # Ray starts it again, and its state file knows where it was
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


class RayController:
    """The replicas' and the driver's end: fulfils `ControllerClient`. Pickles; makes the actor when it is not there."""

    def __init__(self, setting: ControllerSetting) -> None:
        self._setting = setting
        self._handle: Any = None

    def __reduce__(self) -> tuple[object, ...]:
        return (RayController, (self._setting,))

    @property
    def handle(self) -> Any:
        if self._handle is None:
            self._handle = ControllerWorker.options(  # type: ignore[attr-defined]
                name=self._setting.actor, namespace=NAMESPACE, lifetime="detached", get_if_exists=True
            ).remote(self._setting)
        return self._handle

    async def follow(self, replica: str, known_generation: int, timeout_s: float) -> EndpointPlan | None:
        return await self._ask("follow", replica, known_generation, timeout_s)

    async def report(self, report: ReplicaReport) -> list[ReplicaReport]:
        return await self._ask("report", report)

    async def leave(self, replica: str) -> None:
        await self._ask("leave", replica)

    async def administer(self, change: Mapping[str, Any], by: str) -> dict[str, Any]:
        return await self._ask("administer", dict(change), by, timeout_s=CHANGE_TIMEOUT_S)

    async def load(self, name: str, parameters: Mapping[str, Any], by: str) -> None:
        await self._ask("load", name, dict(parameters), by, timeout_s=LOAD_TIMEOUT_S + CALL_TIMEOUT_S)

    async def unload(self, name: str, by: str) -> None:
        await self._ask("unload", name, by, timeout_s=LOAD_TIMEOUT_S)

    async def status(self) -> dict[str, Any]:
        return await self._ask("status")

    def get(self, method: str, *arguments: object) -> Any:
        """From a thread without an event loop. Raises ConnectionLost, or what the controller raised."""
        try:
            return ray.get(getattr(self.handle, method).remote(*arguments), timeout=CALL_TIMEOUT_S)
        except (RayActorError, GetTimeoutError, RayTaskError) as error:
            raise self._translated(error) from error

    def end(self) -> None:
        """End the actor, if there is one, and forget its state. Idempotent."""
        StateFile(self._setting.folder / f"{self._setting.name}.json").remove()
        try:
            actor = ray.get_actor(self._setting.actor, NAMESPACE)
        except ValueError:
            return
        with suppress(RayActorError, GetTimeoutError):
            ray.get(actor.forget.remote(), timeout=CALL_TIMEOUT_S)
        ray.kill(actor, no_restart=True)

    async def _ask(self, method: str, *arguments: object, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await getattr(self.handle, method).remote(*arguments)
        except (RayActorError, RayTaskError, TimeoutError) as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> Exception:
        if isinstance(error, RayTaskError):
            return error.cause if isinstance(error.cause, ShoalError) else error
        if isinstance(error, ray.exceptions.ActorDiedError):
            self._handle = None  # it ended for good, idle or by mistake: the next call makes another
        return ConnectionLost(f"the controller of {self._setting.name!r} did not answer: {error}")
