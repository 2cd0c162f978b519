"""The one place that changes an endpoint's versions: it owns the desired state, which every replica follows.

Called by the replicas (`follow`, `report`, `leave`), by `admin_api`, and by its own clock (`tick`). It never sees a
client's request, and the replicas continue to serve without it. Every decision is on disk before a replica receives it;
a restarted controller continues from there.

| capacity          | what blocks                           | who unblocks                  | close()         |
|-------------------|---------------------------------------|-------------------------------|-----------------|
| MAX_EVENTS events | `follow`, up to its timeout           | a new plan                    | wakes all       |
| (the oldest go)   | `wait_until`, up to its timeout       | reports, ticks, changes       |                 |
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache

from shoal.errors import InferenceError, RegistryError
from shoal.serve.controller import alias_sync
from shoal.serve.controller.assignments import Assignments
from shoal.serve.controller.canary_guard import judge
from shoal.serve.controller.evidence import EvidenceCollector, FailureEvents
from shoal.serve.controller.live_control import LiveControl
from shoal.serve.controller.rollout import (
    FOLLOWING,
    AbandonRollout,
    Goal,
    Phase,
    Proceed,
    Rollout,
    abandon_candidate,
    build_model_plan,
    decide_next_step,
    drop_candidate,
    find_staging_error,
    finish_rollout,
    flip_to_candidate,
    open_canary,
    stage_version,
)
from shoal.serve.controller.state import MAX_EVENTS, ControllerState, Deployment, Event, ModelState, StateFile
from shoal.serve.messages.desired_state import NEWEST, NO_SHARES, EndpointPlan, ModelPlan, TrafficShares
from shoal.serve.messages.replica_report import ReplicaReport
from shoal.serve.spec.model_options import ModelOptions
from shoal.serve.spec.model_source import Catalogue, RegistryCatalogue

logger = logging.getLogger(__name__)

LEASE_S = 6.0  # a replica without a report for this long is no longer waited for
STAGE_TIMEOUT_S = 600.0
MAX_POLL_S = 2.0  # of one `follow`; well below the lease


class EndpointController:
    """The controller of one endpoint. All methods belong on one event loop; only `follow` and `wait_until` wait.

    deployments:   the models that the endpoint was deployed with; the state file takes precedence
    deployment_id: of the call of `deploy`: another id starts with a fresh state
    catalogue:     opens the registry at a URL or folder, once
    audit:         logs every change
    memory_bytes:  of each replica's models; None: every replica has every model
    """

    def __init__(
        self,
        name: str,
        deployments: Sequence[Deployment],
        *,
        deployment_id: str = "",
        state_file: StateFile | None = None,
        catalogue: Callable[[str], Catalogue] = RegistryCatalogue,
        lease_s: float = LEASE_S,
        stage_timeout_s: float = STAGE_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        audit: Callable[[Event], None] = lambda event: None,
        memory_bytes: int | None = None,
    ) -> None:
        self.name = name
        self._audit = audit
        self._file = state_file or StateFile(None)
        self.catalogue, self._clock = cache(catalogue), clock
        self._lease_s, self._stage_timeout_s = lease_s, stage_timeout_s
        self.reports: dict[str, ReplicaReport] = {}
        self._last_seen_s: dict[str, float] = {}
        self._ready_replicas: set[str] = set()  # those once ready: none is while a model is added
        self._phase_since_s: dict[str, float] = {}  # when a model entered its phase, as far as this process knows
        self._evidence: dict[str, EvidenceCollector] = {}
        self.registry_errors: dict[str, str] = {}  # the registry's last error, by model
        self._plan, self._certificate_expires_at = EndpointPlan(), 0.0
        self._plan_changed, self._state_changed = asyncio.Event(), asyncio.Event()
        self._closed = False
        saved = self._file.load(deployment_id)
        self.state = saved or ControllerState(deployment=deployment_id, started_at=time.time())
        for replica in self.state.replicas:  # each has one lease to report again
            self._add_replica(replica)
        self.assignments = Assignments(
            memory_bytes, self.state, self.reports, self.catalogue, self._commit, self.wait_until, clock
        )
        self._failures = FailureEvents(self.record_event, clock)
        self.live = LiveControl(
            lambda: self.state.models, self.reports, self._file, self.record_event, self._set_rollout, self._commit
        )
        if saved is None:
            for deployment in deployments:
                begins = FOLLOWING if deployment.is_live else Rollout()
                self.state.models[deployment.name] = ModelState(deployment, begins)
        for model in self.state.models:
            self._enter_phase(model, self.state.models[model].rollout)
        self._commit()
        self.tick()

    @property
    def plan(self) -> EndpointPlan:
        """The desired state, as the replicas receive it."""
        return self._plan

    # -- replicas ---------------------------------------------------------------------------------------------------

    async def follow(self, replica: str, known_generation: int, timeout_s: float) -> EndpointPlan | None:
        """Wait for a desired state other than `known_generation`; None after `timeout_s`."""
        self._renew_lease(replica)
        if self.state.catch_up_generation(known_generation):
            self._commit()
        if self._plan.generation == known_generation and not self._closed:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(timeout_s, MAX_POLL_S)):
                    await self._plan_changed.wait()
        return self._plan if self._plan.generation != known_generation else None

    def report(self, report: ReplicaReport) -> list[ReplicaReport]:
        """Take in a replica's report and advance the rollouts; returns the newest reports of the others."""
        self._renew_lease(report.replica)
        self.reports[report.replica] = report
        if report.ready:
            self._ready_replicas.add(report.replica)
        if self.state.catch_up_generation(report.generation):
            self._commit()
        for book in self._evidence.values():
            book.add_report(report)
        self.live.receive(report)
        self.assignments.receive(report)
        self._failures.receive(report, {name: each.rollout.stable for name, each in self.state.models.items()})
        self._advance_all()
        self._notify_waiters()
        return [other for replica, other in self.reports.items() if replica != report.replica]

    def leave(self, replica: str) -> None:
        """Forget a replica that is being stopped. Idempotent."""
        report = self.reports.get(replica)
        if report is not None:
            if report.pid and replica not in self._ready_replicas:  # Serve gave it up before it answered a request
                self.assignments.count_lost(replica)
            self._remove_replica(replica)

    def _remove_replica(self, replica: str) -> None:
        del self.reports[replica], self._last_seen_s[replica]
        self.assignments.forget(replica)
        self._ready_replicas.discard(replica)
        self._failures.forget(replica)
        self.state.replicas.remove(replica)
        self._commit()
        self._advance_all()

    def _renew_lease(self, replica: str) -> None:
        if replica not in self.reports:
            self._add_replica(replica)
            if replica not in self.state.replicas:
                self.state.replicas.append(replica)
                self._commit()
        self._last_seen_s[replica] = self._clock()

    def _add_replica(self, replica: str) -> None:
        self.reports[replica] = ReplicaReport(replica)
        self._last_seen_s[replica] = self._clock()

    # -- the clock --------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Handle events without a report: silent replicas, moved aliases, timeouts."""
        now_s = self._clock()
        self._file.retry_writes()
        for replica in [each for each, heard_s in self._last_seen_s.items() if now_s - heard_s > self._lease_s]:
            self.assignments.count_lost(replica)
            self.record_event("replica_lost", reason=f"{replica} did not report for {self._lease_s:g} s")
            self._remove_replica(replica)
        for name in list(self.state.models):
            self._follow_alias(name)
            self._remove_failed_addition(name)
        self.live.tick()
        self.assignments.tick()
        self._advance_all()
        self._notify_waiters()  # for what time alone makes possible

    def extend_leases(self, seconds: float) -> None:
        """Extend all leases after this process or its disk stalled: no report could arrive meanwhile."""
        now_s = self._clock()
        self._last_seen_s = {replica: min(now_s, heard_s + seconds) for replica, heard_s in self._last_seen_s.items()}

    def close(self, forget: bool = False) -> None:
        """Wake all waiting callers; `forget` when the endpoint itself is gone. Idempotent."""
        self._closed = True
        if forget:
            self._file.remove()
        self._plan_changed.set()
        self._notify_waiters()

    def _remove_failed_addition(self, name: str) -> None:
        """Remove an added model that no replica could load. Its caller removes it too, but may have called a controller
        that died meanwhile."""
        model = self.state.models[name]
        if model.is_added and model.rollout.phase is Phase.VACANT and model.rollout.refused:
            self.remove_model(name, model.rollout.by, f"it could not be loaded: {model.rollout.reason}")

    def _follow_alias(self, name: str) -> None:
        model = self.state.models[name]
        if not alias_sync.is_following_alias(model):
            return
        try:
            meant = self.catalogue(model.deployment.registry).follow(name, model.deployment.version)
        except RegistryError as error:
            if self.registry_errors.get(name) != str(error):
                logger.error("%s: serving continues: %s", name, error)
            self.registry_errors[name] = str(error)
            return
        self.registry_errors.pop(name, None)
        if meant != model.meant:
            rollout = replace(model.rollout, refused=0) if model.meant else model.rollout
            model.meant, model.rejected = meant, []
            self.adjust_rollout(name, rollout)
        match alias_sync.next_for_alias(model):
            case alias_sync.AbandonStaging(reason):
                self.abandon_candidate(name, "registry", reason)
            case alias_sync.PromoteCandidate(why) if self.has_candidate(name):
                self.adjust_rollout(name, replace(model.rollout, kind="promote", by="registry", why=why))
                with suppress(InferenceError):  # the registry is gone since the last query: the next tick tries again
                    self.flip(name)
            case alias_sync.BeginRollout(kind, why):
                self.begin_rollout(name, meant, Goal.FLIP, kind=kind, by="registry", why=why)

    def _advance_all(self) -> None:
        for name in list(self.state.models):
            self._advance(name)

    def _advance(self, name: str) -> None:
        """Take the next step of a model's rollout: the only place where one advances automatically."""
        model = self.state.models[name]
        rollout, reports = model.rollout, list(self.reports.values())
        if not reports:  # asleep: a replica has the full time to stage once there is one
            self._phase_since_s[name] = self._clock()
        if rollout.phase in (Phase.STAGING, Phase.CANARY):
            reports = self.assignments.select(name, reports)
        if rollout.phase is Phase.CANARY:
            book = self._evidence[name]
            evidence = book.build_evidence(reports, model.metrics, rollout.lost_replicas)
            guard = ModelOptions.parse(model.deployment.options).guard
            if reason := find_staging_error(name, rollout, reports) or judge(guard, evidence):
                self.drop_candidate(name, "rollback", "guard", reason)
        elif rollout.phase in (Phase.STAGING, Phase.FLIPPING):
            waited_s = self._clock() - self._phase_since_s[name]
            step = self.assignments.prepare(name)
            match step or decide_next_step(name, rollout, reports, waited_s, self._stage_timeout_s):
                case AbandonRollout(reason):
                    self.abandon_candidate(name, rollout.by, reason)
                case Proceed() if rollout.phase is Phase.FLIPPING:
                    model.before = None
                    self._set_rollout(name, finish_rollout(rollout, time.time()))
                case Proceed() if rollout.goal is Goal.CANARY:
                    self._open_canary(name)
                case Proceed():
                    self.flip(name)

    # -- acts -------------------------------------------------------------------------------------------------------

    def add_model(self, deployment: Deployment) -> None:
        """Serve another model; the caller or the next tick begins its version."""
        rollout = Rollout(attempt=self.state.num_attempts)
        model = self.state.models[deployment.name] = ModelState(deployment, rollout, is_added=True)
        self._enter_phase(deployment.name, model.rollout)
        self._commit()

    def redeploy(self, deployment: Deployment, *, is_on_trial: bool = False) -> None:
        """Serve a present model by another version or alias; reverted if its next rollout is abandoned before it
        answers."""
        model = self.state.models[deployment.name]
        model.before = model.deployment if is_on_trial else None
        model.deployment = deployment
        self.registry_errors.pop(deployment.name, None)  # it concerned the former alias
        self._commit()

    def remove_model(self, name: str, by: str, reason: str) -> None:
        """Stop serving a model: the replicas answer its pending requests, then drop it."""
        self.assignments.forget_model(name)
        rollout = self.state.models.pop(name).rollout
        self.state.num_attempts = max(self.state.num_attempts, rollout.attempt)
        self._evidence.pop(name, None)
        self.registry_errors.pop(name, None)
        self._file.delete_weights(name)
        self.record_event("delete", name, None, max(rollout.stable, 0) or None, by, reason)
        self._commit()

    def begin_rollout(
        self, name: str, version: int, goal: Goal, *, kind: str, by: str, why: str, shares: TrafficShares = NO_SHARES,
        changes_options: bool = False,
    ) -> None:  # fmt: skip
        """Stage a version of a model whose rollout allows it."""
        rollout, generation = self.state.models[name].rollout, self.state.generation + 1
        rollout = stage_version(
            rollout, version, goal, kind=kind, by=by, why=why, now_s=time.time(), shares=shares, generation=generation,
            changes_options=changes_options,
        )  # fmt: skip
        self._set_rollout(name, rollout)
        self._advance(name)

    def adjust_rollout(self, name: str, rollout: Rollout) -> None:
        """Change the shares or the goal within the same phase."""
        assert rollout.phase is self.state.models[name].rollout.phase, rollout
        self._set_rollout(name, rollout)

    def has_candidate(self, name: str) -> bool:
        """Whether every replica has staged the candidate, also those that joined after it was opened."""
        candidate = self.state.models[name].rollout.candidate
        models = [report.models.get(name) for report in self.assignments.select(name, self.reports.values())]
        return all(model is not None and candidate in model.staged for model in models)

    def is_applied_everywhere(self) -> bool:
        """Whether every replica has received the last change."""
        return all(report.generation >= self._plan.generation for report in self.reports.values())

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a condition; returns whether it came true in time, before the controller was closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition() and not self._closed:
                    await self._state_changed.wait()
        return condition()

    def _open_canary(self, name: str) -> None:
        model = self.state.models[name]
        rollout = open_canary(model.rollout, time.time())
        model.metrics = {}
        self.record_event(rollout.kind, name, rollout.candidate, rollout.stable, rollout.by, rollout.why)
        self._set_rollout(name, rollout)

    def flip(self, name: str) -> None:
        """Let the candidate answer everywhere and move the alias to it: both or neither."""
        model = self.state.models[name]
        rollout = model.rollout
        if problem := alias_sync.move_alias(model.deployment, rollout, self.catalogue):
            if rollout.phase is Phase.STAGING:
                self.abandon_candidate(name, rollout.by, problem)
                return
            raise InferenceError(503, problem)
        self.record_event(rollout.kind, name, rollout.candidate, rollout.stable or None, rollout.by, rollout.why)
        self._set_rollout(name, flip_to_candidate(rollout, self.state.generation + 1, time.time()))
        self._advance(name)

    def abandon_candidate(self, name: str, by: str, reason: str) -> None:
        """Abandon the version that is being staged, and follow what was followed before."""
        model = self.state.models[name]
        rollout = model.rollout
        model.revert_deployment()
        self.record_event("abandon", name, rollout.candidate, rollout.stable or None, by, reason)
        self._reject_version(model, abandon_candidate(rollout, reason, time.time()))

    def drop_candidate(self, name: str, kind: str, by: str, reason: str) -> None:
        """Drop the open candidate; the stable version answers all requests again."""
        model = self.state.models[name]
        rollout = model.rollout
        if rollout.candidate == NEWEST:
            self.live.unshare(name, kind, by, reason)
            return
        self.record_event(kind, name, rollout.stable, rollout.candidate, by, reason)
        self._reject_version(model, drop_candidate(rollout, reason, time.time()))

    def _reject_version(self, model: ModelState, rollout: Rollout) -> None:
        """Reject the alias's version: it is not tried again automatically, whatever else is staged."""
        if rollout.refused and rollout.refused == model.meant:
            model.rejected = [rollout.refused]
        self._set_rollout(model.deployment.name, rollout)

    def _set_rollout(self, name: str, rollout: Rollout) -> None:
        model = self.state.models[name]
        has_moved = rollout.phase is not model.rollout.phase
        model.rollout = rollout
        if has_moved:
            self._enter_phase(name, rollout)
        self._commit()

    def _enter_phase(self, name: str, rollout: Rollout) -> None:
        self._phase_since_s[name] = self._clock()
        self._evidence.pop(name, None)
        if rollout.phase is Phase.CANARY:
            book = self._evidence[name] = EvidenceCollector(name, rollout.stable, rollout.candidate)
            for report in self.reports.values():
                book.add_report(report)

    def record_event(
        self, kind: str, model: str = "", version: int | None = None, previous: int | None = None,
        by: str = "", reason: str = "",
    ) -> None:  # fmt: skip
        """Append a change to the events and the audit log, where the newest version of a run has no number."""
        state, version = self.state, None if version == NEWEST else version
        event = Event(state.num_events, time.time(), kind, model, version, previous, by, reason)
        state.num_events += 1
        state.events = [*state.events[-(MAX_EVENTS - 1) :], event]
        self._audit(event)

    def announce_certificate(self, expires_at: float) -> None:
        """Give the replicas the end of the ingress's certificate, for their metrics."""
        self._certificate_expires_at = expires_at
        self._commit()

    def _commit(self) -> None:
        """Save the state, then notify the replicas."""
        models = tuple(self._plan_model(name, model) for name, model in self.state.models.items())
        # A flip to the version that already answers (an alias returns to it) is a new plan too.
        announced = max((model.rollout.generation for model in self.state.models.values()), default=0)
        desired = replace(self._plan, models=models, certificate_expires_at=self._certificate_expires_at)
        desired = self.assignments.add_peers(desired)
        is_new = desired != self._plan or self._plan.generation != max(announced, self.state.generation)
        if is_new:
            self.state.generation += 1
            self._plan = replace(desired, generation=self.state.generation)
        self._file.save(self.state)
        if is_new:
            self._plan_changed.set()
            self._plan_changed = asyncio.Event()
        self._notify_waiters()

    def _plan_model(self, name: str, model: ModelState) -> ModelPlan:
        asked, before = model.deployment, model.before.options if model.before else None
        plan = build_model_plan(name, asked.registry, asked.options, model.rollout, before)
        return self.assignments.complete(self.live.complete(plan, model), model)

    def _notify_waiters(self) -> None:
        self._state_changed.set()
        self._state_changed = asyncio.Event()
