"""Which replica has which model, where each loads only those that fit its memory.

Owned by the controller, which calls it for every report, request for a load and tick, and puts its answer into the
plan. `placement` decides; this retains what it decides by: sizes, load times, uses and rates. Its assignments are in
the state file, so a restarted controller drops no model. Without `memory_bytes` every replica has every model, and
nothing here does anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.errors import InferenceError, RegistryError
from shoal.runs.formatting import format_size
from shoal.serve.controller.placement import (
    Assign,
    ReplicaMemory,
    ResidentModel,
    TooLarge,
    choose_evicted,
    choose_replica,
    is_hot,
)
from shoal.serve.controller.plan_store import PlanStore
from shoal.serve.controller.rollout import AbandonRollout, Goal, Phase, Proceed, find_staging_error
from shoal.serve.controller.state import ModelState, VersionDescription
from shoal.serve.messages.desired_state import ModelPlan
from shoal.serve.messages.model_errors import OTHER_TENSORS
from shoal.serve.messages.replica_report import ModelReport, ReplicaReport

SPREAD_EVERY_S = 2.0
SPREAD_IDLE_S = 30.0  # of a model that makes way for another's second replica
RETRY_LOAD_S, MAX_RETRY_LOAD_S = 5.0, 300.0  # after a failed load, twice as long after each
MAX_LOST_LOADING = 2  # replicas, without a load that succeeded: then the model may be why
RECENT = 0.5  # weight of the newest load time and rate


@dataclass
class _Use:
    """A model's use on one replica. num_requests: as reported at `reported_s`"""

    used_s: float
    reported_s: float
    num_requests: int = 0
    requests_per_s: float = 0.0


@dataclass
class _FailedLoad:
    reason: str
    until_s: float
    retry_s: float


class Assignments:
    """The assignments of one endpoint.

    memory_bytes: of each replica's models; None: every replica has every model
    """

    def __init__(self, memory_bytes: int | None, store: PlanStore) -> None:
        self._memory_bytes = memory_bytes
        self._store = store
        self._clock = store.clock
        self._state, self._reports = store.state, store.reports
        self._models, self._placement = store.state.models, store.state.placement
        store.has_peers = memory_bytes is not None
        holders = [(name, each) for name, replicas in self._placement.items() for each in replicas]
        self._since_s = dict.fromkeys(holders, self._clock())
        self._known: dict[tuple[str, str, int], VersionDescription] = {}
        self._has_unread = False  # a version that the registry does not describe now
        self._load_s: dict[str, float] = {}
        self._uses: dict[tuple[str, str], _Use] = {}
        self._failed: dict[str, _FailedLoad] = {}
        self._lost_loading: defaultdict[str, set[str]] = defaultdict(set)  # replicas, by the model
        self._spread_s = self._clock()

    def is_on_demand(self, model: ModelState) -> bool:
        """Whether replicas load it when it is asked for."""
        deployment = model.before or model.deployment
        return self._memory_bytes is not None and not deployment.is_live and not deployment.options.get("pin", False)

    def complete(self, plan: ModelPlan, model: ModelState) -> ModelPlan:
        """The plan with the replicas that load the model, and what the others need to know of it."""
        if self._memory_bytes is None or not plan.registry:
            return plan
        model.described = self._describe(model, plan.stable or max(plan.staged, default=0)) or model.described
        size_bytes = self._version_bytes(plan.name, model)
        if not self.is_on_demand(model):
            return replace(plan, size_bytes=size_bytes)
        staged = (plan.stable,) if model.rollout.phase is Phase.FLIPPING else plan.staged
        replicas = tuple(self._placement.get(plan.name, ()))
        signature = model.described.signature if model.described is not None else None
        return replace(plan, staged=staged, replicas=replicas, size_bytes=size_bytes, signature=signature)

    def select(self, name: str, reports: Iterable[ReplicaReport]) -> list[ReplicaReport]:
        model = self._models[name]
        if not self.is_on_demand(model):
            return list(reports)
        replicas = self._placement.get(name, ())
        return [report for report in reports if report.replica in replicas]

    def find_error(self, name: str) -> str:
        """The reason why a model could not be loaded; "" if it could."""
        failed = self._failed.get(name)
        return f"it cannot be loaded: {failed.reason}" if failed is not None else ""

    # -- what is known ----------------------------------------------------------------------------------------------

    def receive(self, report: ReplicaReport) -> None:
        if self._memory_bytes is None:
            return
        if report.address and report.address != self._state.addresses.get(report.replica):
            self._state.addresses = {**self._state.addresses, report.replica: report.address}
            self._store.commit()
        now_s = self._clock()
        for name, model in report.models.items():
            if name in self._models:
                self._receive_model(name, report.replica, model, now_s)
        self._shrink(report.replica)

    def _receive_model(self, name: str, replica: str, model: ModelReport, now_s: float) -> None:
        key, rollout = (name, replica), self._models[name].rollout
        for rejected in model.rejected:
            if rejected.version == rollout.stable and rollout.is_open and key in self._since_s:
                self._fail(name, replica, rejected.reason)
        if (residency := model.residency) is None:
            return
        use = self._uses.setdefault(key, _Use(now_s, now_s))
        use.used_s = max(use.used_s, now_s - residency.idle_s)
        if (elapsed_s := now_s - use.reported_s) > 0.0:
            rate = max(0, residency.requests - use.num_requests) / elapsed_s
            use.requests_per_s += RECENT * (rate - use.requests_per_s)
            use.reported_s, use.num_requests = now_s, residency.requests
        if model.version:
            self._failed.pop(name, None)
            self._lost_loading.pop(name, None)
            self._load_s[name] = RECENT * residency.load_s + (1 - RECENT) * self._load_s.get(name, residency.load_s)

    def count_lost(self, replica: str) -> None:
        """Count a lost replica against the rollouts of its models, and against the models that it was loading."""
        for name, model in self._models.items():
            rollout = model.rollout
            if rollout.phase in (Phase.STAGING, Phase.CANARY) and self.select(name, [self._reports[replica]]):
                model.rollout = replace(rollout, lost_replicas=rollout.lost_replicas + 1)
        for name in list(self._placement):
            self._count_lost_load(name, replica)

    def _count_lost_load(self, name: str, replica: str) -> None:
        """A load may kill its replica, as by its memory: requests for the model would then kill one after the other."""
        is_loading = (name, replica) in self._since_s and not self._has_loaded(name, replica)
        if not is_loading or not self._models[name].rollout.is_open:  # a rollout counts them itself
            return
        lost = self._lost_loading[name]
        lost.add(replica)
        if len(lost) >= MAX_LOST_LOADING:
            for other in lost.intersection(self._placement[name]) - {replica}:
                self._unassign(name, other)
            self._fail(name, replica, f"{len(lost)} replicas were lost while they loaded it")

    def forget(self, replica: str) -> None:
        for name in [name for name, holder in self._since_s if holder == replica]:
            self._unassign(name, replica)
        self._uses = {key: use for key, use in self._uses.items() if key[1] != replica}
        self._state.addresses = {name: each for name, each in self._state.addresses.items() if name != replica}

    def forget_model(self, name: str) -> None:
        self._forget_placement(name)
        for known in (self._load_s, self._failed, self._lost_loading):
            known.pop(name, None)
        self._uses = {key: use for key, use in self._uses.items() if key[0] != name}

    async def request_load(
        self, name: str, replica: str, idle_s: Mapping[str, float], lost: Sequence[str], timeout_s: float
    ) -> int | None:
        """Have a model loaded; returns the generation of a plan in which a replica has it, None after `timeout_s`.

        idle_s: how long ago the models of the calling replica were used
        lost:   replicas that it cannot reach
        Raises InferenceError, as `request`.
        """
        for each, each_s in idle_s.items():
            if (use := self._uses.get((each, replica))) is not None:
                use.used_s = max(use.used_s, self._clock() - each_s)
        is_assigned = await self._store.wait_until(lambda: self.request(name, replica, lost), timeout_s)
        return self._state.generation if is_assigned else None

    async def load(self, name: str, timeout_s: float) -> None:
        """Have a model loaded, if it is on demand, and wait for it. Raises InferenceError, as `request`."""

        def is_loaded() -> bool:
            reports = self.select(name, self._reports.values()) if self.request(name) else []
            stable = self._models[name].rollout.stable
            return any(report.models[name].version == stable for report in reports if name in report.models)

        model = self._models.get(name)
        if model is not None and self.is_on_demand(model) and not await self._store.wait_until(is_loaded, timeout_s):
            problem = f"model {name!r} was not loaded after {timeout_s:g} s: every replica uses what it has"
            raise InferenceError(503, problem, retry_after_s=5.0)

    # -- decisions --------------------------------------------------------------------------------------------------

    def request(self, name: str, caller: str = "", lost: Iterable[str] = ()) -> bool:
        """Have a replica load the model, if none has it that the caller can reach; whether one does.

        Raises InferenceError: 404 for an unknown model, 503 for one that does not load or is too large.
        """
        model = self._store.get_model(name)
        for replica in lost:
            self._count_lost_load(name, replica)
        failed, now_s = self._failed.get(name), self._clock()
        if failed is not None and now_s < failed.until_s:
            problem = f"model {name!r} cannot be loaded: the endpoint's status has why"
            raise InferenceError(503, problem, retry_after_s=failed.until_s - now_s)
        holders, reachable = set(self._placement.get(name, ())), {caller, *self._state.addresses} - set(lost)
        if not self.is_on_demand(model) or holders & reachable:
            return True
        size_bytes, memory = self._total_bytes(name, model), self._build_memory(holders)
        match choose_replica(
            size_bytes, {each: each_memory for each, each_memory in memory.items() if each in reachable}
        ):
            case Assign(replica, evicted):
                self._assign(name, replica, evicted)
                return True
            case TooLarge(capacity_bytes):
                raise InferenceError(503, describe_too_large(name, size_bytes, capacity_bytes), retry_after_s=60.0)
        return False

    def prepare(self, name: str) -> Proceed | AbandonRollout | None:
        """Make memory for a version that is being staged, on the replicas that have the model, or on one.

        Returns Proceed where nothing is to be staged, since no replica is to load the version yet (a model that the
        endpoint was deployed with), or it replaces a version that cannot be loaded, or alongside which it does not fit.
        Returns None where the next step depends on the replicas' reports.
        """
        model = self._models[name]
        rollout = model.rollout
        if not self.is_on_demand(model) or rollout.phase is not Phase.STAGING:
            return None
        holders = list(self._placement.get(name, ()))
        if not holders and not rollout.stable and not model.is_added:
            return Proceed()
        self._failed.pop(name, None)  # another version may load
        if rollout.stable != rollout.candidate:
            stable, reports = replace(rollout, candidate=rollout.stable), self.select(name, self._reports.values())
            if reason := find_staging_error(name, stable, reports):
                return self._replace_stable(name, model) if rollout.goal is Goal.FLIP else AbandonRollout(reason)
        size_bytes, capacity_bytes = self._total_bytes(name, model), self._capacity_bytes
        if size_bytes > capacity_bytes:
            one_bytes = self._version_bytes(name, model)
            if rollout.goal is not Goal.FLIP or one_bytes > capacity_bytes:
                return AbandonRollout(describe_too_large(name, size_bytes, capacity_bytes))
            return self._replace_stable(name, model)
        if not holders:
            self.request(name)
        for replica in holders:
            self._shrink(replica)
        return None

    def _replace_stable(self, name: str, model: ModelState) -> Proceed | AbandonRollout:
        """Let a version that is not staged replace the former one, if clients may call both alike."""
        before, after = (self._describe(model, each) for each in (model.rollout.stable, model.rollout.candidate))
        if before is not None and (after is None or before.signature != after.signature):
            return AbandonRollout(OTHER_TENSORS)
        self._forget_placement(name)
        return Proceed()

    def tick(self) -> None:
        """Describe what could not be read; let further replicas load the models that one alone is too slow for."""
        if self._has_unread:
            self._has_unread = False
            self._store.commit()
        for name in [each for each in self._placement if not self.is_on_demand(self._models[each])]:
            self._forget_placement(name)  # it is pinned by now
        now_s = self._clock()
        if self._memory_bytes is None or now_s - self._spread_s < SPREAD_EVERY_S:
            return
        self._spread_s = now_s
        for name, replicas in list(self._placement.items()):
            model = self._models[name]
            if not replicas or len(replicas) >= len(self._reports) or not model.rollout.is_open:
                continue
            rate = sum(use.requests_per_s for (each, _), use in self._uses.items() if each == name)
            latencies = (report.latency for report in self._store.list_reports(name))
            latency = next(filter(None, latencies), ())  # a replica that only forwards has none
            if not is_hot(rate / len(replicas), latency):
                continue
            decision = choose_replica(self._total_bytes(name, model), self._build_memory(set(replicas)), SPREAD_IDLE_S)
            if isinstance(decision, Assign):
                self._assign(name, decision.replica, decision.evicted)

    # -- acts -------------------------------------------------------------------------------------------------------

    def _assign(self, name: str, replica: str, evicted: Iterable[str]) -> None:
        for each in evicted:
            self._unassign(each, replica)
        self._placement.setdefault(name, []).append(replica)
        self._since_s[name, replica] = self._clock()
        self._store.commit()

    def _unassign(self, name: str, replica: str) -> None:
        del self._since_s[name, replica]
        self._placement[name].remove(replica)
        if not self._placement[name]:
            del self._placement[name]

    def _forget_placement(self, name: str) -> None:
        for replica in list(self._placement.get(name, ())):
            self._unassign(name, replica)

    def _fail(self, name: str, replica: str, reason: str) -> None:
        """Leave a model that cannot be loaded for a while: each try would drop others."""
        before = self._failed.get(name)
        retry_s = RETRY_LOAD_S if before is None else min(MAX_RETRY_LOAD_S, 2 * before.retry_s)
        self._failed[name] = _FailedLoad(reason, self._clock() + retry_s, retry_s)
        self._unassign(name, replica)
        self._store.commit()

    def _shrink(self, replica: str) -> None:
        """Drop what a replica has no memory for, since a model turned out larger, or has two versions for now."""
        memory = self._build_memory(set()).get(replica)
        if memory is not None and memory.free_bytes < 0:
            evicted = choose_evicted(-memory.free_bytes, memory.models) or ()
            for name in evicted:
                self._unassign(name, replica)
            if evicted:
                self._store.commit()

    # -- views ------------------------------------------------------------------------------------------------------

    def _build_memory(self, excluded: set[str]) -> dict[str, ReplicaMemory]:
        """The memory of each replica that has reported, but for the excluded ones."""
        capacity_bytes = self._capacity_bytes
        models: dict[str, dict[str, ResidentModel]] = {
            name: {} for name, report in self._reports.items() if report.pid and name not in excluded
        }
        for name, replica in self._since_s:
            if replica in models:
                models[replica][name] = self._build_resident(name, replica)
        return {name: ReplicaMemory(capacity_bytes, each) for name, each in models.items()}

    def _build_resident(self, name: str, replica: str) -> ResidentModel:
        now_s, model = self._clock(), self._models[name]
        since_s, use = self._since_s[name, replica], self._uses.get((name, replica))
        report = self._reports[replica].models.get(name)
        waiting = 0 if report is None or report.residency is None else report.residency.waiting + report.queued_rows
        return ResidentModel(
            self._total_bytes(name, model),
            load_s=self._load_s.get(name, 0.0),
            idle_s=now_s - max(since_s, use.used_s if use is not None else since_s),
            age_s=now_s - since_s,
            is_in_use=not self._has_loaded(name, replica) or waiting > 0 or not model.rollout.is_open,
            has_copy=len(self._placement[name]) > 1,
        )

    def _has_loaded(self, name: str, replica: str) -> bool:
        report = self._reports[replica].models.get(name)
        return report is not None and report.version > 0

    @property
    def _capacity_bytes(self) -> int:
        """The memory of a replica beyond the models that it always has."""
        pinned = [(name, model) for name, model in self._models.items() if not self.is_on_demand(model)]
        return (self._memory_bytes or 0) - sum(self._total_bytes(*each) for each in pinned)

    def _total_bytes(self, name: str, model: ModelState) -> int:
        """The bytes of the versions that a replica has of a model now."""
        rollout = model.rollout
        has_two = rollout.phase in (Phase.STAGING, Phase.CANARY) and rollout.stable > 0
        return self._version_bytes(name, model) * (2 if has_two else 1)

    def _version_bytes(self, name: str, model: ModelState) -> int:
        """The bytes of each version: of its payload, or of one on demand as measured, at most all that there is.

        A load during which something else grew would otherwise refuse the model, and never be measured again.
        """
        versions = [version for version in (model.rollout.stable, model.rollout.candidate) if version]
        described = [self._describe(model, version) for version in versions]
        payload_bytes = max((each.size_bytes for each in described if each), default=0)
        if not self.is_on_demand(model):
            return payload_bytes
        residencies = [report.residency for report in self._store.list_reports(name)]
        sizes = [[each.measured_bytes.get(version, 0) for each in residencies if each] for version in versions]
        measured_bytes = max((min(filter(None, each), default=0) for each in sizes), default=0)
        return max(payload_bytes, min(measured_bytes, self._capacity_bytes) if measured_bytes else 0)

    def _describe(self, model: ModelState, version: int) -> VersionDescription | None:
        """What is known of a version; None for no version, and for one that cannot be read now."""
        deployment = model.deployment
        if not version or deployment.is_live:
            return None
        key = deployment.registry, deployment.name, version
        if key not in self._known:
            try:
                signature, size_bytes = self._store.catalogue(deployment.registry).describe(deployment.name, version)
            except RegistryError:  # the load fails with the reason
                self._has_unread = True
                known = model.described
                return known if known is not None and known.version == version else None
            self._known[key] = VersionDescription(version, signature.model_dump(mode="json"), size_bytes)
        return self._known[key]


def describe_too_large(name: str, size_bytes: int, capacity_bytes: int) -> str:
    """The reason why a model can never be loaded, with the remedy."""
    there = f"endpoint.memory leaves {format_size(max(0, capacity_bytes))} beside pinned models"
    return f"model {name!r} takes {format_size(size_bytes)}, and {there}: give more, or pin fewer models"
