"""The controller's process: the controller, its administration, its status and its audit log.

Run by the Ray shell, on one event loop, as an actor with these methods. Its state is a file, from which a restarted one
continues.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from shoal.atomic_file import replace_synced
from shoal.client.discovery import EndpointCard
from shoal.client.endpoint_status import CertificateStatus
from shoal.cluster.ingress.serve_environment import find_ingress_folder, hold_while_asleep, limit_answers
from shoal.cluster.ingress.tls import POLL_S, CertificateWatch
from shoal.serve.controller.admin_api import AdminApi
from shoal.serve.controller.audit import AUDIT_FILE, AuditLog
from shoal.serve.controller.config import ControllerConfig
from shoal.serve.controller.controller import LEASE_S, EndpointController
from shoal.serve.controller.state import Event, StateFile
from shoal.serve.controller.status import StatusReporter
from shoal.serve.messages.desired_state import EndpointPlan
from shoal.serve.messages.replica_report import ReplicaReport
from shoal.weights import WeightSnapshot

TICK_S = 0.25
STALL_S = LEASE_S / 2  # a tick this late was stalled, and so were the replicas' reports
logger = logging.getLogger(__name__)


class ControllerService:
    """Ends (`on_idle`) after `config.idle_s` without a call from a replica: the endpoint may be gone without notice.

    One that watches a certificate stays while there is an ingress: an endpoint that sleeps needs a valid one to wake.
    """

    def __init__(
        self,
        config: ControllerConfig,
        on_idle: Callable[[], None] = lambda: None,
        has_ingress: Callable[[], bool] = lambda: False,
    ) -> None:
        self.on_idle, self.has_ingress = on_idle, has_ingress
        self._began_at = time.time()
        # Here, since this is HAProxy's host, and no replica starts before it has asked this object for its plan.
        self._name, spec = config.name, config.spec
        hold_while_asleep(os.environ, self._name, spec.may_sleep, config.key_digests)
        limit_answers(os.environ, self._name, spec.answer_s)
        self._audit = AuditLog(config.folder.parent / AUDIT_FILE, config.name)
        self._controller = controller = EndpointController(
            config.name,
            config.models,
            deployment_id=config.deployment,
            state_file=StateFile(config.state_file),
            audit=self._audit.record_change,
            memory_bytes=spec.memory,
        )
        self.request_load = controller.assignments.request_load
        self._admin_api = AdminApi(controller, config.registry, spec.options)
        self._watch = CertificateWatch(spec.tls.files, find_ingress_folder()) if spec.tls is not None else None
        self._polled_s = -POLL_S
        self._status = StatusReporter(
            controller,
            self._describe_certificate,
            may_sleep=spec.may_sleep,
            grpc=spec.grpc_address,
            num_replicas=spec.least_replicas,
            owner=config.owner,
            lifetime="detached" if config.is_detached else "driver" if config.driver else "serve",
        )
        self._card = config.card_file
        if config.is_detached:
            card = EndpointCard(self._name, spec.url, os.getpid(), socket.gethostname())
            replace_synced(self._card, msgspec.json.encode(card))
        self._task: asyncio.Task[None] | None = None
        self._last_follow_s, self._idle_s = time.monotonic(), config.idle_s

    async def follow(self, replica: str, known_generation: int, timeout_s: float) -> EndpointPlan | None:
        self._last_follow_s = time.monotonic()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return await self._controller.follow(replica, known_generation, timeout_s)

    async def report(self, report: ReplicaReport) -> list[ReplicaReport]:
        others = self._controller.report(report)
        self._audit.record_auth_failures([report, *others])
        return others

    async def leave(self, replica: str) -> None:
        self._controller.leave(replica)

    async def store_weights(self, model: str, snapshot: WeightSnapshot) -> None:
        self._controller.live.store_weights(model, snapshot)

    async def fetch_weights(self, model: str, version: int) -> WeightSnapshot | None:
        return self._controller.live.fetch_weights(model, version)

    async def administer(self, change: Mapping[str, Any], by: str) -> dict[str, Any]:
        with self._audit.audit_request(str(change.get("action", "")), change, by):
            return self._status.describe_model(await self._admin_api.administer(change, by))

    async def load(self, name: str, parameters: Mapping[str, Any], by: str) -> None:
        with self._audit.audit_request("load", {"model": name, "parameters": parameters}, by):
            await self._admin_api.load(name, parameters, by)

    async def unload(self, name: str, by: str) -> None:
        with self._audit.audit_request("unload", {"model": name}, by):
            await self._admin_api.unload(name, by)

    async def status(self) -> dict[str, Any]:
        return self._status.describe_endpoint()

    async def set_wanted(self, wanted: str) -> None:
        """What the status says about replicas that have no place yet."""
        self._status.wanted = wanted

    async def events(self, after: int) -> list[Event]:
        state = self._controller.state
        if after < state.num_events:
            return [event for event in state.events if event.number > after]
        # The state was lost, and with it the numbering: the caller has no events of this process yet.
        return [event for event in state.events if event.time >= self._began_at]

    async def pid(self) -> int:
        return os.getpid()

    async def forget(self) -> None:
        """Remove the state of an endpoint that is gone."""
        hold_while_asleep(os.environ, self._name, is_on=False)
        limit_answers(os.environ, self._name, None)
        self._card.unlink(missing_ok=True)
        self._controller.close(forget=True)

    async def _run(self) -> None:
        ticked_s = time.monotonic()
        try:
            while True:
                before_s, ticked_s = ticked_s, time.monotonic()
                if (stalled_s := ticked_s - before_s) > STALL_S:
                    self._controller.extend_leases(stalled_s)
                    self._last_follow_s += stalled_s
                if ticked_s - self._last_follow_s >= self._idle_s:
                    if self._watch is None or not await asyncio.to_thread(self.has_ingress):
                        break
                    self._last_follow_s = ticked_s
                self._controller.tick()
                self._status.sample()
                if self._watch is not None and ticked_s - self._polled_s >= POLL_S:
                    self._polled_s = ticked_s
                    if (event := await asyncio.to_thread(self._watch.poll)) is not None:
                        self._controller.record_event(event[0], by="controller", reason=event[1])
                    self._controller.announce_certificate(self._watch.current.not_after)
                await asyncio.sleep(TICK_S)
        except Exception:
            logger.exception("the controller of %r failed", self._controller.name)
            os._exit(1)  # Ray restarts it, and it continues from its state file
        self.on_idle()

    def _describe_certificate(self) -> CertificateStatus | None:
        watch = self._watch
        return CertificateStatus(watch.current.not_after, watch.days_remaining, watch.problem) if watch else None
