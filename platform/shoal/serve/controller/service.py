"""All that an endpoint's controller is in its process: the controller, its administration, its status, its audit log.

Run by the Ray shell, on one event loop, as an actor whose methods these are. Its state is a file, so that another one
goes on where it was.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from shoal.serve.controller.admin_api import Administration
from shoal.serve.controller.audit import FILE, AuditLog
from shoal.serve.controller.config import ControllerSetting
from shoal.serve.controller.controller import LEASE_S, EndpointController
from shoal.serve.controller.state import Event, StateFile
from shoal.serve.controller.status import StatusBook
from shoal.serve.messages.desired_state import EndpointPlan
from shoal.serve.messages.replica_report import ReplicaReport
from shoal.weights import WeightSnapshot

TICK_S = 0.25
STALL_S = LEASE_S / 2  # a tick as late as this was held up, and so was whatever replicas have said meanwhile
logger = logging.getLogger(__name__)


class ControllerService:
    """Ends (`ended`) when no replica has asked for `setting.idle_s`: nobody may have said that the endpoint is gone."""

    def __init__(self, setting: ControllerSetting) -> None:
        self._began_at = time.time()
        self._audit = AuditLog(setting.folder.parent / FILE, setting.name)
        self._controller = EndpointController(
            setting.name,
            setting.models,
            deployment_id=setting.deployment,
            state_file=StateFile(setting.state_file),
            audit=self._audit.changed,
        )
        self._administration = Administration(self._controller, setting.registry, setting.options)
        self._status = StatusBook(self._controller, setting.grpc, setting.num_replicas)
        self._running: asyncio.Task[None] | None = None
        self._asked_s, self._idle_s = time.monotonic(), setting.idle_s

    async def follow(self, replica: str, known_generation: int, timeout_s: float) -> EndpointPlan | None:
        self._asked_s = time.monotonic()
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())
        return await self._controller.follow(replica, known_generation, timeout_s)

    async def report(self, report: ReplicaReport) -> list[ReplicaReport]:
        others = self._controller.report(report)
        self._audit.refused([report, *others])
        return others

    async def leave(self, replica: str) -> None:
        self._controller.leave(replica)

    async def keep(self, model: str, snapshot: WeightSnapshot) -> None:
        self._controller.live.keep(model, snapshot)

    async def kept(self, model: str, version: int) -> WeightSnapshot | None:
        return self._controller.live.kept(model, version)

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
        state = self._controller.state
        if after < state.num_events:
            return [event for event in state.events if event.number > after]
        # The state was lost, and with it their number: those of this life are not known yet.
        return [event for event in state.events if event.time >= self._began_at]

    async def pid(self) -> int:
        return os.getpid()

    async def forget(self) -> None:
        """The endpoint is gone, and its state with it."""
        self._controller.close(forget=True)

    async def _run(self) -> None:
        ticked_s = time.monotonic()
        try:
            while True:
                before_s, ticked_s = ticked_s, time.monotonic()
                if (stalled_s := ticked_s - before_s) > STALL_S:
                    self._controller.stood_still(stalled_s)
                    self._asked_s += stalled_s
                if ticked_s - self._asked_s >= self._idle_s:
                    break
                self._controller.tick()
                self._status.sample()
                await asyncio.sleep(TICK_S)
        except Exception:
            logger.exception("the controller of %r failed", self._controller.name)
            os._exit(1)  # whoever runs it starts it again, and its state file knows where it was
        self.ended()

    def ended(self) -> None:
        """No replica has asked for a while: there is none any more."""
