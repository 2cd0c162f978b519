"""One model of the plan on one replica, from its first load until its last answer.

Made by the model manager, on its event loop. Loads missing versions one after the other, and lets the plan's versions
answer as soon as they are loaded. A model under other options is loaded alongside, and then replaces the one that
answers. A slot that the plan no longer has is retired: it drains its model, closes it, and drops what it still loads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.serve.messages.desired_state import ModelPlan
from shoal.serve.messages.inference import ServedModelProtocol, TracerProtocol
from shoal.serve.messages.replica_report import ModelReport, RejectedVersion
from shoal.serve.model.predictor import LoadedModel, Predictor
from shoal.serve.replica.cold_models import OnDemandRequests
from shoal.serve.replica.live_versions import LiveFollower, LiveVersionSelector
from shoal.serve.replica.loader import StagedVersion, StagingError, VersionLoader
from shoal.serve.replica.model_memory import ModelMemory
from shoal.serve.replica.model_statistics import ModelStatistics
from shoal.serve.replica.served_model import ServedModel
from shoal.serve.replica.version_router import ModelBatcher
from shoal.serve.replica.watchers import ControllerClient
from shoal.serve.spec.model_options import ModelOptions
from shoal.serve.spec.model_source import LiveModel, RegisteredModel
from shoal.weights import WeightSnapshot

DRAIN_POLL_S = 0.02
Options = dict[str, Any]  # as the plan has them
# Called with a loaded version, in a thread, before it answers: the model's name and registry ("" for a live model), its
# options, the version.
Prepare = Callable[[str, str, ModelOptions, LoadedModel], None]


@dataclass
class SlotHost:
    """What the slots of a replica share.

    live:       the models that follow the weights of a run, by name
    on_changed: called when there is something to report
    prepare:    what libraries do with a loaded version
    drain_s:    how long streamed answers of a retired model may take
    """

    batcher: ModelBatcher
    loader: VersionLoader
    memory: ModelMemory
    on_demand: OnDemandRequests
    controller: ControllerClient
    live: Mapping[str, LiveModel]
    show_errors: bool
    tracer: TracerProtocol | None = None
    on_changed: Callable[[], None] = lambda: None
    prepare: Prepare = lambda name, registry, options, loaded: None
    drain_s: float = 10.0


class ModelSlot:
    """`plan` is the newest of the model, None once the slot is retired; `served` answers, None before a first version
    is loaded; `rejected` is the last version that could not be loaded. Call `apply` next."""

    def __init__(self, plan: ModelPlan, host: SlotHost) -> None:
        self.name, self._host = plan.name, host
        self.plan: ModelPlan | None = plan
        self.served: ServedModel | None = None
        self.follower: LiveFollower | None = None  # of a live model
        self.rejected: RejectedVersion | None = None
        self._next: ServedModel | None = None  # under other options; answers nothing before it replaces `served`
        self._loading: asyncio.Task[None] | None = None
        self._draining: set[asyncio.Task[None]] = set()

    @property
    def is_ending(self) -> bool:
        """Whether a retired model still answers pending calls, or loads."""
        return bool(self._draining) or self._loading is not None

    @property
    def is_answering(self) -> bool:
        return self.served is not None and self.served.version > 0

    @property
    def failed_version(self) -> int:
        """The version that could not be loaded; 0 for none."""
        return self.rejected.version if self.rejected is not None else 0

    @property
    def answering(self) -> ServedModel | None:
        """The model, once it answers as planned: a replica that takes over a canary needs both versions for that."""
        served, plan = self.served, self.plan
        if served is None or plan is None or not served.version:
            return None
        return served if plan.candidate in (0, self.failed_version, *served.versions) else None

    @property
    def has_staged(self) -> bool:
        """Whether all planned versions are loaded, except a failed candidate; of a live model, a pinned one."""
        served, plan = self.served, self.plan
        assert plan is not None
        if not plan.registry:
            return self.follower is not None and self.follower.has(plan)
        if served is not None and served.plan_options != plan.options:
            return False
        loaded = served.versions if served is not None else []
        return (self.is_answering or not plan.staged) and {*plan.staged} <= {*loaded, self.failed_version}

    @property
    def startup_error(self) -> str:
        """The reason why the model can never answer; "" when it may."""
        plan = self.plan
        served = self.served
        rejected = self.rejected
        assert plan is not None
        if plan.reason:
            return f"model {self.name!r}: {plan.reason}"
        if served is not None and served.version and served.plan_options == plan.options:
            return ""  # rejected under other options, which no replica takes then
        if rejected is not None and plan.staged[:1] in ((), (rejected.version,)):  # the first must answer
            return f"model {self.name!r} cannot be served: {rejected.reason}"
        return ""

    def report(self, report: ModelReport | None = None) -> ModelReport | None:
        """The model's report, in place of that of one of its name that is being drained; None for nothing to report."""
        if self.plan is None:  # without a version: the next model of its name does not wait for it
            return replace(self.served.report(), version=0, staged=()) if self.served is not None else None
        if self.served is not None:
            report = self.served.report()
            if self._next is not None:
                report = replace(report, next_staged=max(self._next.versions, default=0))
        if self.rejected is not None:
            report = replace(report or ModelReport(), rejected=(self.rejected,))
        return report

    # -- the plan -----------------------------------------------------------------------------------------------------

    def apply(self, plan: ModelPlan) -> None:
        """Apply a plan as far as its versions are loaded, and begin to load the others."""
        self.plan = plan
        if plan.registry:
            self._reconcile(plan)
        elif self.follower is not None:
            self.follower.apply(plan)
        elif self._loading is None and self.rejected is None:
            self._loading = self._start(self._serve_live(plan))

    def retire(self, cold: ServedModelProtocol | None) -> None:
        """Give the model no new calls, and close it once it has answered its pending ones.

        cold: answers late calls for a model that made way for others
        """
        self.plan = None
        self._drop_next()
        if self.follower is not None:
            self.follower.close(timeout_s=0.0)
        if self.served is not None:
            self.served.cold = cold
            self._drain(self.served)

    def close(self) -> None:
        """Stop loading and following, and fail queued requests. Idempotent."""
        if self.follower is not None:
            self.follower.close(timeout_s=2.0)
        for task in filter(None, (self._loading, *self._draining)):
            task.cancel()
        for served in filter(None, (self.served, self._next)):
            served.close()

    def _reconcile(self, plan: ModelPlan) -> None:
        """Let the planned versions answer, as far as they are loaded, and load the missing ones."""
        if self.rejected is not None and self.rejected.attempt != plan.attempt:
            self.rejected = None
        if not any(_has_loaded(self._next, *each) for each in self._list_wanted(plan)):
            self._drop_next()
        if self.served is not None and self._next is not None and self._next.plan_options == plan.options:
            former = self.served
            self.served = self._next
            self._next = None
            former.successor = self.served
            self._drain(former)
        if self.served is not None and self.served.plan_options == plan.options:
            self.served.apply(plan)
            self._host.memory.account(self.served, len(self.served.versions) * plan.size_bytes)
        self._host.on_demand.notify()
        if self._loading is None and self._find_missing() is not None:
            self._loading = self._start(self._load_missing())

    def _list_wanted(self, plan: ModelPlan) -> list[tuple[int, Options]]:
        """The versions to have, each with its options, in the order of their loads. The others wait for a first one
        under the plan's options: they are checked against it, and it may answer."""
        served = self.served
        if served is None or not served.versions or served.plan_options != plan.options:
            return [(version, plan.options) for version in plan.staged[:1]]
        return [*((version, plan.options) for version in plan.staged), (plan.next_version, plan.next_options)]

    def _find_missing(self) -> tuple[int, Options] | None:
        """The version to load next, and its options; None for none."""
        for wanted in self._list_wanted(self.plan) if self.plan is not None else ():
            is_loaded = _has_loaded(self.served, *wanted) or _has_loaded(self._next, *wanted)
            if not is_loaded and wanted[0] not in (0, self.failed_version):
                return wanted
        return None

    # -- loads --------------------------------------------------------------------------------------------------------

    async def _load_missing(self) -> None:
        try:
            while (missing := self._find_missing()) is not None:
                await self._load(*missing)
                if self.plan is not None:  # it may have changed
                    self._reconcile(self.plan)
                self._host.on_changed()
        finally:
            self._loading = None

    async def _load(self, version: int, plan_options: Options) -> None:
        plan = self.plan
        served = self.served
        host = self._host
        assert plan is not None
        source, options = RegisteredModel(self.name, plan.registry), ModelOptions.parse(plan_options)
        last = served.predictor if served is not None else None
        wanted = version, plan_options
        async with host.memory.reserve(version, lambda: self.plan if self._find_missing() == wanted else None) as fits:
            try:
                if fits:
                    staged = await host.loader.load_version(source, version, options, last)
                    await asyncio.to_thread(host.prepare, self.name, plan.registry, options, staged.loaded)
                    self._add(staged, plan_options)
            except StagingError as error:
                if self.plan is not None:
                    self.rejected = RejectedVersion(version, str(error), plan.attempt)

    def _add(self, staged: StagedVersion, options: Options) -> None:
        """Add a loaded version, if the plan still wants it."""
        plan = self.plan
        served = self.served
        predictor = staged.predictor
        if plan is None or (staged.loaded.version, options) not in self._list_wanted(plan):
            return
        if served is None or served.plan_options == options:
            target = self.served = served or self._make_served(predictor, options)
        else:
            target = self._next = self._next or self._make_served(predictor, options)
        target.predictor = predictor
        target.router.add(staged.loaded)
        self._host.memory.add(target, plan, staged.load_s)

    async def _serve_live(self, plan: ModelPlan) -> None:
        host, model = self._host, self._host.live[self.name]
        try:
            options = ModelOptions.parse(plan.options)
            predictor = await host.loader.build_predictor(model.factory, model.signature, options)
        except StagingError as error:
            if self.plan is not None:
                self.rejected = RejectedVersion(0, str(error), plan.attempt)
        else:
            if self.plan is not None:
                served = self.served = self._make_served(predictor, plan.options, ModelStatistics(self.name, live=True))

                def load(snapshot: WeightSnapshot) -> LoadedModel:
                    with host.loader.time_load():
                        loaded = predictor.load(snapshot)
                        host.prepare(self.name, "", options, loaded)
                    return loaded

                served.live = LiveVersionSelector(
                    options.guard, load, served.point, served.forward_times, options.held_versions
                )
                self.follower = LiveFollower(
                    self.name, served.live, model.weights, host.controller, self.plan, lambda: host.on_changed()
                )
        self._loading = None

    def _make_served(
        self, predictor: Predictor, options: Options, counts: ModelStatistics | None = None
    ) -> ServedModel:
        host = self._host
        if self.served is not None:
            counts = self.served.counts
        if self.name in host.on_demand.models:
            counts = host.on_demand.get_use(self.name).counts
        served = ServedModel(
            self.name,
            predictor,
            host.batcher,
            tracer=host.tracer,
            show_errors=host.show_errors,
            counts=counts,
        )
        served.plan_options = options
        return served

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _drop_next(self) -> None:
        if self._next is not None:
            self._close_served(self._next)
            self._next = None

    def _drain(self, served: ServedModel) -> None:
        """Close a model once it has answered its pending calls."""

        async def drain() -> None:
            ends_s = time.monotonic() + self._host.drain_s
            while not served.is_idle:
                if time.monotonic() > ends_s:
                    served.close_streams("is no longer served here")
                await asyncio.sleep(DRAIN_POLL_S)
            self._close_served(served)
            self._draining.discard(task)
            if served is self.served:
                self.served = None
            self._host.on_changed()

        task = self._start(drain())
        self._draining.add(task)

    def _close_served(self, served: ServedModel) -> None:
        served.close()
        self._host.memory.account(served, 0)

    @staticmethod
    def _start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)


def _has_loaded(served: ServedModel | None, version: int, options: Options) -> bool:
    return served is not None and served.plan_options == options and version in served.versions
