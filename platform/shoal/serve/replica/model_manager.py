"""The models of an endpoint on one replica: applies the controller's plan to them.

Made by the replica, called by its plan follower and by the protocols, all on one event loop. Applies a plan at once
where it can, stages missing versions alongside the serving ones, and then applies the rest. Decides nothing about
versions: it forwards administrators' requests to the controller.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from shoal.batching.batcher import Batcher
from shoal.errors import ConnectionLost, InferenceError, ShoalError
from shoal.open_inference.episodes import EpisodeAnswer, EpisodeRequest
from shoal.serve.messages.desired_state import EndpointPlan, ModelPlan
from shoal.serve.messages.inference import InferCall, Outputs, RepositoryEntry, ServedModelProtocol
from shoal.serve.messages.model_errors import unloaded_model
from shoal.serve.messages.replica_report import ModelReport, RejectedVersion, ReplicaReport
from shoal.serve.model.predictor import OpenTemplate, Predictor
from shoal.serve.replica.cold_models import ColdModel, OnDemandRequests
from shoal.serve.replica.live_follower import LiveFollower
from shoal.serve.replica.loader import StagedVersion, StagingError, VersionLoader
from shoal.serve.replica.model_memory import ModelMemory
from shoal.serve.replica.model_statistics import ModelStatistics
from shoal.serve.replica.peers import HttpTransport, PeerTransport
from shoal.serve.replica.served_model import ServedModel
from shoal.serve.replica.version_router import BatchGroup
from shoal.serve.replica.watchers import ControllerClient
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_options import ModelOptions
from shoal.serve.spec.model_source import LiveModel, RegisteredModel

if TYPE_CHECKING:
    from shoal.serve.protocol.tracing import Tracer


DRAIN_POLL_S = 0.02
ON_DEMAND_LOADS = 2, 16  # of models on demand, at a time; predictors kept for models that are built alike
MAX_STAGING_S = 900.0  # of staging; the controller gives up earlier
# Keys of the tasks that retire a model, build a live one, and load a version under other options. Above 0 they stage a
# version, below DRAIN they drain a replaced model.
RETIRE, LIVE, NEXT, DRAIN = 0, -1, -2, -3
T = TypeVar("T")


class ModelManager:
    """Implements `ModelManagerProtocol`.

    live:    the models that follow the weights of a run, by name
    tracer:  traces the batches of traced requests; None without tracing
    share:   opens the templates of models that several workers share; None for those of this process
    peers:   reaches other replicas, for models on demand
    changed: called when there is something to report
    """

    def __init__(
        self,
        replica: str,
        spec: EndpointSpec,
        live: Mapping[str, LiveModel],
        batcher: Batcher[BatchGroup, InferCall, Outputs],
        controller: ControllerClient,
        tracer: Tracer | None = None,
        share: OpenTemplate | None = None,
        peers: PeerTransport | None = None,
    ) -> None:
        self._replica, self._spec, self._live, self._tracer = replica, spec, live, tracer
        self._batcher, self._controller = batcher, controller
        self.on_changed: Callable[[], None] = lambda: None
        self._plan: EndpointPlan | None = None
        self._plans: dict[str, ModelPlan] = {}
        self._models: dict[str, ServedModel] = {}
        self._retiring: dict[str, ServedModel] = {}  # answers its pending requests only
        self._next: dict[str, ServedModel] = {}  # under other options; answers nothing before it replaces its model
        self._num_replaced = 0
        self._rejected: dict[str, RejectedVersion] = {}
        self._loader = VersionLoader(spec.torch_threads, share, spec.code, *(ON_DEMAND_LOADS if spec.memory else ()))
        self._memory = ModelMemory(spec.memory or 0, lambda: psutil.Process().memory_info().rss)
        self.on_demand = OnDemandRequests(
            replica, controller, peers or HttpTransport(), self._find_answering, self._find_error, spec.answer_s
        )
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.followers: dict[str, LiveFollower] = {}

    # -- ModelManagerProtocol -----------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        permanent = self._list_permanent()
        return self._plan is not None and (not permanent or any(map(self._is_answering, permanent)))

    @property
    def is_complete(self) -> bool:
        """Whether every model answers that this replica always has, as a new replica needs."""
        return self._plan is not None and all(map(self._is_answering, self._list_permanent()))

    def list_models(self) -> Sequence[ServedModelProtocol]:
        models: dict[str, ServedModelProtocol] = {**self.on_demand.models, **self._models}
        return list(models.values())

    def list_loaded(self) -> list[ServedModel]:
        """The models that this replica answers for."""
        return list(self._models.values())

    def get_model(self, name: str) -> ServedModel | ColdModel:
        cold = self.on_demand.models.get(name)
        if cold is not None and self._find_answering(name) is None:
            return cold
        if (served := self._models.get(name)) is not None:
            return served
        if name in self._plans:
            raise unloaded_model(name, self._find_error(name))
        raise self.on_demand.describe_unknown(name, self._models)

    def get_peer_model(self, name: str, token: bytes, generation: bytes) -> ServedModelProtocol:
        expected = self._plan.peer_token if self._plan is not None else ""
        if not expected or not hmac.compare_digest(token, expected.encode()):
            raise InferenceError(401, "this path is for replicas of the endpoint")
        model = self.get_model(name)
        return model.await_load(int(generation)) if isinstance(model, ColdModel) else model

    def list_repository(self) -> list[RepositoryEntry]:
        plans = () if self._plan is None else self._plan.models
        loaded = {name: served.versions for name, served in self._models.items()}
        retiring = [name for name in self._retiring if name not in self.on_demand.models]
        return build_repository_index(plans, loaded, self._rejected, retiring, self._spec.show_errors)

    async def load(self, name: str, parameters: Mapping[str, Any], by: str = "") -> None:
        await self._ask_controller(self._controller.load(name, parameters, by))

    async def unload(self, name: str, by: str = "") -> None:
        await self._ask_controller(self._controller.unload(name, by))

    async def administer(self, change: Mapping[str, Any], by: str = "") -> dict[str, Any]:
        return await self._ask_controller(self._controller.administer(change, by))

    async def take_episode(self, request: EpisodeRequest) -> EpisodeAnswer:
        name = request.model if request.model in self.on_demand.models else self.get_model(request.model).name
        episodes = self._live[name].episodes if name in self._live else None
        if episodes is None:
            remedy = "a run's policy does, with learn_from_endpoint=true"
            raise InferenceError(404, f"model {name!r} does not learn from its users: {remedy}")
        return await episodes.take(request)

    async def status(self) -> dict[str, Any]:
        return await self._ask_controller(self._controller.status())

    async def _ask_controller(self, asked: Awaitable[T]) -> T:
        try:
            return await asked
        except ConnectionLost as error:
            problem = f"the endpoint's controller is away, models are served as they are: {error}"
            raise InferenceError(503, problem, retry_after_s=1.0) from None

    # -- the plan -----------------------------------------------------------------------------------------------------

    def apply(self, plan: EndpointPlan) -> None:
        """Apply a plan as far as possible, and begin to stage missing versions."""
        self.on_demand.apply(plan)
        self._memory.retain_models(model.name for model in plan.models)
        before, self._plan = self._plans, plan
        self._plans = {model.name: model for model in plan.models if model.is_for(self._replica)}
        self._rejected = {name: rejected for name, rejected in self._rejected.items() if name in self._plans}
        for name in [name for name in self._models if not before[name].is_same_model(self._plans.get(name))]:
            self._drop_next(name)
            hosted = self._retiring[name] = self._models.pop(name)
            hosted.cold = self.on_demand.models.get(name)
            if hosted.cold is not None:
                self.on_demand.get_use(name).evictions += 1
            if name in self.followers:
                self.followers.pop(name).close(timeout_s=0.0)
                del self._tasks[name, LIVE]
            self._start_task((name, RETIRE), self._retire(name, hosted))
        for model in self._plans.values():
            if model.registry:
                self._reconcile(model)
            elif model.name in self.followers:
                self.followers[model.name].apply(model)
            elif (model.name, LIVE) not in self._tasks:
                self._start_task((model.name, LIVE), self._serve_live(model))

    def find_startup_error(self) -> str:
        """The reason why this replica can never become ready; "" when it may."""
        for plan in self._list_permanent():
            name = plan.name
            rejected, hosted = self._rejected.get(name), self._models.get(name)
            if plan.reason:
                return f"model {name!r}: {plan.reason}"
            if hosted is not None and hosted.version and hosted.plan_options == plan.options:
                continue  # rejected under other options, which no replica takes then
            if rejected is not None and plan.staged[:1] in ((), (rejected.version,)):  # the first must answer
                return f"model {name!r} cannot be served: {rejected.reason}"
        return ""

    @property
    def has_served(self) -> bool:
        """Whether the endpoint has answered before this replica came."""
        return any(plan.stable for plan in self._plans.values())

    @property
    def is_staged(self) -> bool:
        """Whether all planned versions are loaded, except failed candidates and live weights."""
        return self._plan is not None and all(self._has_staged(plan) for plan in self._list_permanent())

    @property
    def has_polled(self) -> bool:
        """Whether each live model has taken what its run had published, if anything."""
        return all(follower.has_polled for follower in self.followers.values())

    def _list_permanent(self) -> list[ModelPlan]:
        """The plans of the models that this replica always has."""
        return [plan for plan in self._plans.values() if plan.replicas is None]

    def _is_answering(self, plan: ModelPlan) -> bool:
        return (served := self._models.get(plan.name)) is not None and served.version > 0

    def _find_answering(self, name: str) -> ServedModel | None:
        """The model, once it answers: a replica that takes over a canary needs both versions for that."""
        served, plan = self._models.get(name), self._plans.get(name)
        if served is None or plan is None or not served.version:
            return None
        failed = self._rejected[name].version if name in self._rejected else 0
        return served if plan.candidate in (0, failed, *served.versions) else None

    def _find_error(self, name: str) -> str:
        if (rejected := self._rejected.get(name)) is None:
            return ""
        return rejected.reason if self._spec.show_errors else "the endpoint's status has why"

    def _has_staged(self, plan: ModelPlan) -> bool:
        hosted = self._models.get(plan.name)
        if not plan.registry:
            return hosted is not None and self.followers[plan.name].has(plan)
        loaded = hosted.versions if hosted is not None else []
        failed = self._rejected[plan.name].version if plan.name in self._rejected else 0
        if hosted is not None and hosted.plan_options != plan.options:
            return False
        is_answering = not plan.staged or self._is_answering(plan)
        return is_answering and {*plan.staged} <= {*loaded, failed}

    def report(self) -> ReplicaReport:
        """The models' part of the report to the controller."""
        # A retiring model has no version to report: the next model of its name does not wait for it.
        models = {name: replace(hosted.report(), version=0, staged=()) for name, hosted in self._retiring.items()}
        models |= {name: hosted.report() for name, hosted in self._models.items()}
        for name, successor in self._next.items():
            models[name] = replace(models[name], next_staged=max(successor.versions, default=0))
        for name, rejected in self._rejected.items():
            models[name] = replace(models.get(name, ModelReport()), rejected=(rejected,))
        models = self.on_demand.add_residency(models, self._memory, self._models)
        plan = self._plan or EndpointPlan()
        computing_s = self._batcher.computing_s
        return ReplicaReport(
            self._replica,
            os.getpid(),
            plan.generation,
            self.is_ready,
            models,
            computing_s=computing_s,
            host=socket.gethostname(),
            certificate_expires_at=plan.certificate_expires_at,
        )

    def check_health(self) -> None:
        """Raise ShoalError when a thread has died or a load hangs."""
        busy_s = max([self._loader.busy_s, *(follower.busy_s for follower in self.followers.values())])
        if busy_s > MAX_STAGING_S:
            raise ShoalError(f"a version has been loading for {busy_s:.0f} s")
        for name, follower in self.followers.items():
            if not follower.alive:
                raise ShoalError(f"the thread that follows the weights of {name!r} has died")

    def close(self) -> None:
        """Stop following and staging, and fail queued requests. Idempotent."""
        for follower in self.followers.values():
            follower.close(timeout_s=2.0)
        for task in self._tasks.values():
            task.cancel()
        self._loader.close()
        self.on_demand.close()
        for hosted in (*self._models.values(), *self._next.values(), *self._retiring.values()):
            hosted.close()

    def _reconcile(self, plan: ModelPlan) -> None:
        """Apply a registered model's plan, as far as its versions are loaded."""
        name = plan.name
        if (rejected := self._rejected.get(name)) is not None and rejected.attempt != plan.attempt:
            del self._rejected[name]
        successor, awaited = self._next.get(name), plan.next_version or max(plan.staged[:1], default=0)
        if successor is not None and (
            successor.plan_options != plan.newest_options or awaited not in successor.versions
        ):
            self._drop_next(name)
        self._switch_options(plan)
        hosted = self._models.get(name)
        if hosted is not None and hosted.plan_options == plan.options:
            hosted.apply(plan)
            self._memory.account(hosted, len(hosted.versions) * plan.size_bytes)
        self.on_demand.notify()
        failed = self._rejected[name].version if name in self._rejected else 0
        for key, version, options in self._list_missing(plan):
            if version != failed and (name, key) not in self._tasks:
                self._start_task((name, key), self._stage(plan, key, version, options))

    def _list_missing(self, plan: ModelPlan) -> list[tuple[int, int, dict[str, Any]]]:
        """The versions to load now: the key of the task, the version and its options."""
        hosted, is_next_loaded = self._models.get(plan.name), plan.name in self._next
        if hosted is not None and hosted.plan_options != plan.options:  # it has missed the staging, and still answers
            return [] if is_next_loaded else [(NEXT, version, plan.options) for version in plan.staged[:1]]
        loaded = hosted.versions if hosted is not None else []
        missing = [(version, version, plan.options) for version in plan.staged if version not in loaded]
        if not loaded:
            return missing[:1]  # the others are checked against it
        if plan.next_version and not is_next_loaded:
            missing.append((NEXT, plan.next_version, plan.next_options))
        return missing

    async def _stage(self, plan: ModelPlan, key: int, version: int, plan_options: dict[str, Any]) -> None:
        """Load a version, then reconcile again: the plan may have changed."""
        name, hosted = plan.name, self._models.get(plan.name)
        source, options = RegisteredModel(name, plan.registry), ModelOptions.parse(plan_options)
        signature, built = (hosted.signature, hosted.built) if hosted is not None else (None, None)
        async with self._memory.reserve(version, lambda: self._plans.get(name)) as is_wanted:
            try:
                if is_wanted:
                    staged = await self._loader.load_version(source, version, options, signature, built)
                    self._add_staged(name, staged, plan_options)
            except StagingError as error:
                if name in self._plans:
                    self._rejected[name] = RejectedVersion(version, str(error), plan.attempt)
        del self._tasks[name, key]
        if name in self._plans:
            self._reconcile(self._plans[name])
        self.on_changed()

    def _add_staged(self, name: str, staged: StagedVersion, options: dict[str, Any]) -> None:
        wanted, hosted, version = self._plans.get(name), self._models.get(name), staged.loaded.version
        if wanted is None or version not in (*wanted.staged, wanted.next_version):
            return
        if options == wanted.options and (hosted is None or hosted.plan_options == options):
            group = self._models
        elif hosted is not None and options == wanted.newest_options:
            group = self._next
        else:
            return
        target = group.get(name)
        if target is None:
            counts = hosted.counts if hosted is not None else None
            if name in self.on_demand.models:
                counts = self.on_demand.get_use(name).counts
            target = group[name] = self._make_served_model(name, staged.built.predictor, options, counts=counts)
        target.built, target.predictor = staged.built, staged.built.predictor
        target.router.add(staged.loaded)
        self._memory.add(target, wanted, staged.load_s)

    def _make_served_model(
        self, name: str, predictor: Predictor, options: dict[str, Any], *,
        is_live: bool = False, counts: ModelStatistics | None = None,
    ) -> ServedModel:  # fmt: skip
        made = ServedModel(
            name, predictor, self._batcher, is_live=is_live, tracer=self._tracer, show_errors=self._spec.show_errors,
            counts=counts,
        )  # fmt: skip
        made.plan_options = options
        return made

    def _switch_options(self, plan: ModelPlan) -> None:
        """Replace a model by the one that was loaded under the plan's options; it answers its pending requests."""
        name = plan.name
        hosted, successor = self._models.get(name), self._next.get(name)
        if hosted is None or successor is None or successor.plan_options != plan.options:
            return
        hosted.successor = self._models[name] = self._next.pop(name)
        self._num_replaced += 1
        key = (name, DRAIN - self._num_replaced)
        self._start_task(key, self._drain(key, hosted))

    async def _drain(self, key: tuple[str, int], served: ServedModel) -> None:
        while not served.is_idle:
            await asyncio.sleep(DRAIN_POLL_S)
        self._close_served(served)
        del self._tasks[key]

    def _drop_next(self, name: str) -> None:
        if (successor := self._next.pop(name, None)) is not None:
            self._close_served(successor)

    def _close_served(self, served: ServedModel) -> None:
        served.close()
        self._memory.account(served, 0)

    async def _serve_live(self, plan: ModelPlan) -> None:
        name, model = plan.name, self._live[plan.name]
        try:
            predictor = await self._loader.build_predictor(
                model.factory, model.signature, ModelOptions.parse(plan.options)
            )
        except StagingError as error:
            if name in self._plans:
                self._rejected[name] = RejectedVersion(0, str(error), plan.attempt)
            return
        if name not in self._plans:  # deleted meanwhile
            del self._tasks[name, LIVE]
            return
        hosted = self._models[name] = self._make_served_model(name, predictor, plan.options, is_live=True)
        assert hosted.live is not None
        self.followers[name] = LiveFollower(
            name, hosted.live, model.weights, self._controller, self._plans[name], lambda: self.on_changed()
        )

    async def _retire(self, name: str, served: ServedModel) -> None:
        """Drop a model without new calls once it has answered its pending ones."""
        while not served.is_idle:
            await asyncio.sleep(DRAIN_POLL_S)
        self._close_served(served)
        if self._retiring.get(name) is served:
            del self._retiring[name]
        self._tasks.pop((name, RETIRE), None)  # another model may have its name by now
        self.on_changed()

    def _start_task(self, key: tuple[str, int], work: Coroutine[Any, Any, None]) -> None:
        self._tasks[key] = asyncio.get_running_loop().create_task(work)


def build_repository_index(
    plans: Iterable[ModelPlan],
    loaded: Mapping[str, list[int]],
    rejected: Mapping[str, RejectedVersion],
    retiring: Iterable[str],
    show_errors: bool,
) -> list[RepositoryEntry]:
    """List every planned version. A model on demand is READY: it is loaded when it is asked for.

    loaded:   versions by model
    retiring: models that only answer their pending requests
    """
    entries = []
    for plan in plans:
        name, versions = plan.name, loaded.get(plan.name, [])
        entries += [RepositoryEntry(name, str(version), "READY") for version in versions]
        error = rejected.get(name)
        for version in plan.staged:
            if version in versions:
                continue
            if error is not None and error.version == version:
                reason = error.reason if show_errors else "it cannot be loaded: see the status"
                entries.append(RepositoryEntry(name, str(version), "UNAVAILABLE", reason))
            else:
                entries.append(RepositoryEntry(name, str(version), "LOADING" if plan.signature is None else "READY"))
        if not versions and not plan.staged:
            reason = plan.reason if show_errors else ""
            entries.append(RepositoryEntry(name, "", "UNAVAILABLE", reason or "no weights yet"))
    return entries + [RepositoryEntry(name, "", "UNLOADING") for name in retiring]
