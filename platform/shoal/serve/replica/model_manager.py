"""The models of an endpoint on one replica: gives each of the controller's plan a slot, and applies the plan to them.

Made by the replica, called by its plan follower and by the protocols, all on one event loop. Decides nothing about
versions: it forwards administrators' requests to the controller.
"""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Callable, Mapping, Sequence

import psutil

from shoal.errors import InferenceError, ShoalError
from shoal.open_inference.episodes import EpisodeAnswer, EpisodeRequest
from shoal.serve.messages.desired_state import EndpointPlan
from shoal.serve.messages.inference import RepositoryEntry, ServedModelProtocol, TracerProtocol
from shoal.serve.messages.model_errors import unloaded_model
from shoal.serve.messages.replica_report import ModelReport, ReplicaReport
from shoal.serve.model.predictor import OpenTemplate
from shoal.serve.protocol.pipeline import GENERATION_HEADER, PEER_HEADER
from shoal.serve.protocol.request_lifecycle import Send
from shoal.serve.replica.cold_models import ColdModel, OnDemandRequests
from shoal.serve.replica.live_versions import LiveFollower
from shoal.serve.replica.loader import VersionLoader
from shoal.serve.replica.model_memory import ModelMemory
from shoal.serve.replica.model_slot import ModelSlot, Prepare, SlotHost
from shoal.serve.replica.peers import HttpRequest, PeerTransport
from shoal.serve.replica.served_model import ServedModel
from shoal.serve.replica.version_router import ModelBatcher
from shoal.serve.replica.watchers import ControllerClient
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_source import LiveModel

ON_DEMAND_LOADS = 2, 16  # of models on demand, at a time; predictors kept for models that are built alike
MAX_STAGING_S = 900.0  # of staging; the controller gives up earlier


class ModelManager:
    """Implements `ModelManagerProtocol`.

    live:   the models that follow the weights of a run, by name
    tracer: traces the batches of traced requests; None without tracing
    share:  opens the templates of models that several workers share; None for those of this process
    peers:  reaches other replicas, for models on demand
    """

    def __init__(
        self,
        replica: str,
        spec: EndpointSpec,
        live: Mapping[str, LiveModel],
        batcher: ModelBatcher,
        controller: ControllerClient,
        tracer: TracerProtocol | None = None,
        share: OpenTemplate | None = None,
        peers: PeerTransport | None = None,
    ) -> None:
        self.replica, self._spec = replica, spec
        self.controller = controller
        self._plan: EndpointPlan | None = None
        self._slots: dict[str, ModelSlot] = {}  # of planned models
        self._retired: list[ModelSlot] = []  # which may not have ended
        self.on_demand = OnDemandRequests(
            replica, controller, peers or PeerTransport(), self._find_answering, self._find_error, spec.answer_s
        )
        loader = VersionLoader(spec.torch_threads, share, spec.code, *(ON_DEMAND_LOADS if spec.memory else ()))
        memory = ModelMemory(spec.memory or 0, lambda: psutil.Process().memory_info().rss)
        self._host = SlotHost(
            batcher, loader, memory, self.on_demand, controller, live, spec.show_errors, tracer, drain_s=spec.drain_s
        )

    def call_when_changed(self, on_changed: Callable[[], None]) -> None:
        """Call `on_changed` from now on when there is something to report."""
        self._host.on_changed = on_changed

    def prepare_with(self, prepare: Prepare) -> None:
        """Call `prepare` from now on with each loaded version, before it answers."""
        self._host.prepare = prepare

    # -- ModelManagerProtocol -----------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        permanent = self._list_permanent()
        return self._plan is not None and (not permanent or any(slot.is_answering for slot in permanent))

    @property
    def is_complete(self) -> bool:
        """Whether every model answers that this replica always has, as a new replica needs."""
        return self._plan is not None and all(slot.is_answering for slot in self._list_permanent())

    def list_models(self) -> Sequence[ServedModelProtocol]:
        models: dict[str, ServedModelProtocol] = {**self.on_demand.models, **self._served}
        return list(models.values())

    def list_loaded(self) -> list[ServedModel]:
        return list(self._served.values())

    def get_model(self, name: str) -> ServedModel | ColdModel:
        cold, slot = self.on_demand.models.get(name), self._slots.get(name)
        if cold is not None and self._find_answering(name) is None:
            return cold
        if slot is not None and slot.served is not None:
            return slot.served
        if slot is not None:
            raise unloaded_model(name, self._find_error(name))
        raise self.on_demand.describe_unknown(name, self._served)

    def is_peer(self, token: bytes) -> bool:
        """Whether another replica of the endpoint shows this token."""
        expected = self._plan.peer_token if self._plan is not None else ""
        return bool(expected) and hmac.compare_digest(token, expected.encode())

    def get_peer_model(self, name: str, token: bytes, generation: bytes) -> ServedModelProtocol:
        if not self.is_peer(token):
            raise InferenceError(401, "this path is for replicas of the endpoint")
        model = self.get_model(name)
        return model.await_load(int(generation)) if isinstance(model, ColdModel) else model

    async def reach_model(self, name: str, request: HttpRequest, send: Send) -> None:
        """See `ColdModel.reach`. The request may have come from another replica."""
        token, generation = (request.headers.get(each, b"") for each in (PEER_HEADER, GENERATION_HEADER))
        model = self.get_peer_model(name, token, generation) if token else self.get_model(name)
        if isinstance(model, ColdModel):
            await model.reach(request, send)

    def list_repository(self) -> list[RepositoryEntry]:
        """Every planned version. A model on demand is READY: it is loaded when it is asked for."""
        show_errors, entries = self._spec.show_errors, list[RepositoryEntry]()
        for plan in () if self._plan is None else self._plan.models:
            name, slot = plan.name, self._slots.get(plan.name)
            rejected = slot.rejected if slot is not None else None
            versions = slot.served.versions if slot is not None and slot.served is not None else []
            entries += [RepositoryEntry(name, str(version), "READY") for version in versions]
            for version in plan.staged:
                if version in versions:
                    continue
                if rejected is not None and rejected.version == version:
                    reason = rejected.reason if show_errors else "it cannot be loaded: see the status"
                    entries.append(RepositoryEntry(name, str(version), "UNAVAILABLE", reason))
                else:
                    state = "LOADING" if plan.signature is None else "READY"
                    entries.append(RepositoryEntry(name, str(version), state))
            if not versions and not plan.staged:
                reason = plan.reason if show_errors else ""
                entries.append(RepositoryEntry(name, "", "UNAVAILABLE", reason or "no weights yet"))
        ending = dict.fromkeys(slot.name for slot in self._list_ending() if slot.served is not None)
        return entries + [
            RepositoryEntry(name, "", "UNLOADING") for name in ending if name not in self.on_demand.models
        ]

    async def take_episode(self, request: EpisodeRequest) -> EpisodeAnswer:
        name = request.model if request.model in self.on_demand.models else self.get_model(request.model).name
        live = self._host.live.get(name)
        if live is None or live.episodes is None:
            remedy = "a run's policy does, with learn_from_endpoint=true"
            raise InferenceError(404, f"model {name!r} does not learn from its users: {remedy}")
        return await live.episodes.take(request)

    # -- the plan -----------------------------------------------------------------------------------------------------

    def apply(self, plan: EndpointPlan) -> None:
        """Apply a plan as far as possible, and begin to load missing versions."""
        self.on_demand.apply(plan)
        self._host.memory.retain_models(model.name for model in plan.models)
        self._plan = plan
        plans = {model.name: model for model in plan.models if model.is_for(self.replica)}
        for name, slot in list(self._slots.items()):
            if slot.plan is None or not slot.plan.is_same_model(plans.get(name)):
                cold = self.on_demand.models.get(name)
                if slot.served is not None and cold is not None:
                    self.on_demand.get_use(name).residency.evictions += 1
                slot.retire(cold)
                self._retired = [*self._list_ending(), slot]
                del self._slots[name]
        for name, model in plans.items():
            if name not in self._slots:
                self._slots[name] = ModelSlot(model, self._host)
            self._slots[name].apply(model)

    def find_startup_error(self) -> str:
        """The reason why this replica can never become ready; "" when it may."""
        return next(filter(None, (slot.startup_error for slot in self._list_permanent())), "")

    @property
    def has_served(self) -> bool:
        """Whether the endpoint has answered before this replica came."""
        return any(slot.plan is not None and slot.plan.stable for slot in self._slots.values())

    @property
    def is_staged(self) -> bool:
        """Whether all planned versions are loaded, except failed candidates and live weights."""
        return self._plan is not None and all(slot.has_staged for slot in self._list_permanent())

    @property
    def has_polled(self) -> bool:
        """Whether each live model has taken what its run had published, if anything."""
        return all(follower.has_polled for follower in self.followers.values())

    @property
    def followers(self) -> dict[str, LiveFollower]:
        return {name: slot.follower for name, slot in self._slots.items() if slot.follower is not None}

    @property
    def _served(self) -> dict[str, ServedModel]:
        return {name: slot.served for name, slot in self._slots.items() if slot.served is not None}

    def _list_permanent(self) -> list[ModelSlot]:
        return [slot for slot in self._slots.values() if slot.plan is not None and slot.plan.replicas is None]

    def _list_ending(self) -> list[ModelSlot]:
        return [slot for slot in self._retired if slot.is_ending]

    def _find_answering(self, name: str) -> ServedModel | None:
        slot = self._slots.get(name)
        return slot.answering if slot is not None else None

    def _find_error(self, name: str) -> str:
        slot = self._slots.get(name)
        if slot is None or slot.rejected is None:
            return ""
        return slot.rejected.reason if self._spec.show_errors else "the endpoint's status has why"

    def report(self) -> ReplicaReport:
        """The models' part of the report to the controller."""
        models: dict[str, ModelReport] = {}
        for slot in (*self._list_ending(), *self._slots.values()):
            if (report := slot.report(models.get(slot.name))) is not None:
                models[slot.name] = report
        plan = self._plan or EndpointPlan()
        return ReplicaReport(
            self.replica,
            os.getpid(),
            plan.generation,
            self.is_ready,
            self.on_demand.add_residency(models, self._host.memory, self._served),
            computing_s=self._host.batcher.computing_s,
            host=socket.gethostname(),
            certificate_expires_at=plan.certificate_expires_at,
        )

    def check_health(self) -> None:
        """Raise ShoalError when a thread has died or a load hangs."""
        if (load_s := self._host.loader.longest_load_s) > MAX_STAGING_S:
            raise ShoalError(f"a version has been loading for {load_s:.0f} s")
        for name, follower in self.followers.items():
            if not follower.thread.is_alive:
                raise ShoalError(f"the thread that follows the weights of {name!r} has died")

    def close(self) -> None:
        """Stop following and staging, and fail queued requests. Idempotent."""
        for slot in (*self._slots.values(), *self._retired):
            slot.close()
        self._host.loader.close()
        self.on_demand.close()
