"""The one place that changes an endpoint's versions: it owns the desired state, which every replica follows.

Called by the replicas (`follow`, `report`, `leave`), by `admin_api`, and by its own clock (`tick`). It never sees a
client's request, and the replicas continue to serve without it. Every decision is on disk before a replica receives it;
a restarted controller continues from there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from shoal.errors import InferenceError, RegistryError
from shoal.serve.controller import alias_sync
from shoal.serve.controller.assignments import Assignments
from shoal.serve.controller.canary_guard import Evidence, judge
from shoal.serve.controller.live_control import LiveControl
from shoal.serve.controller.plan_store import PlanStore
from shoal.serve.controller.rollout import (
    AbandonRollout,
    Goal,
    Phase,
    Proceed,
    Rollout,
    decide_next_step,
    drop_candidate,
    find_staging_error,
    finish_rollout,
    flip_to_candidate,
    open_canary,
    stage_version,
)
from shoal.serve.controller.state import Deployment, Event, ModelState, StateFile
from shoal.serve.messages.counts import VersionCounts
from shoal.serve.messages.desired_state import NO_SHARES, EndpointPlan, TrafficShares
from shoal.serve.messages.replica_report import ReplicaReport
from shoal.serve.spec.model_options import GuardOptions, ModelOptions
from shoal.serve.spec.model_source import LATEST, RegistryCatalogue

logger = logging.getLogger(__name__)

LEASE_S = 6.0  # a replica without a report for this long is no longer waited for
STAGE_TIMEOUT_S = 600.0
MAX_POLL_S = 2.0  # of one `follow`; well below the lease
RECORD_FAILURE_S = 600.0
FOLLOWED = TrafficShares(percent=10.0)  # of a version that an alias means, with `follow: canary`


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
        catalogue: Callable[[str], RegistryCatalogue] = RegistryCatalogue,
        lease_s: float = LEASE_S,
        stage_timeout_s: float = STAGE_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        audit: Callable[[Event], None] = lambda event: None,
        memory_bytes: int | None = None,
    ) -> None:
        self.name = name
        self._lease_s = lease_s
        self._stage_timeout_s = stage_timeout_s
        self._clock = clock
        self.store = store = PlanStore(
            state_file or StateFile(None), deployment_id, deployments, catalogue, clock, audit
        )
        self.state = store.state
        self.reports = store.reports
        self.final_counts: dict[str, dict[str, VersionCounts]] = {}  # of replicas that are gone, by model
        self.catalogue = store.catalogue
        self.wait_until, self.record_event = store.wait_until, store.record_event
        self._last_seen_s: dict[str, float] = {}
        self._ready_replicas: set[str] = set()  # those once ready: none is while a model is added
        self.registry_errors: dict[str, str] = {}  # the registry's last error, by model
        for replica in self.state.replicas:  # each has one lease to report again
            self._add_replica(replica)
        self.assignments, self.live = Assignments(memory_bytes, store), LiveControl(store)
        self._failures = FailureEvents(store)
        store.parts = self.live, self.assignments
        store.commit()
        self.tick()

    @property
    def plan(self) -> EndpointPlan:
        """The desired state, as the replicas receive it."""
        return self.store.plan

    # -- replicas ---------------------------------------------------------------------------------------------------

    async def follow(self, replica: str, known_generation: int, timeout_s: float) -> EndpointPlan | None:
        """Wait for a desired state other than `known_generation`; None after `timeout_s`."""
        self._renew_lease(replica)
        self.store.catch_up_generation(known_generation)
        return await self.store.wait_for_plan(known_generation, min(timeout_s, MAX_POLL_S))

    def report(self, report: ReplicaReport) -> list[ReplicaReport]:
        """Take in a replica's report and advance the rollouts; returns the newest reports of the others."""
        self._renew_lease(report.replica)
        self.reports[report.replica] = report
        self.final_counts.pop(report.replica, None)  # it was taken for lost
        if report.ready:
            self._ready_replicas.add(report.replica)
        self.store.catch_up_generation(report.generation)
        for phase in self.store.phases.values():
            if phase.evidence is not None:
                phase.evidence.add_report(report)
        self.live.receive(report)
        self.assignments.receive(report)
        self._failures.receive(report)
        self._advance_all()
        self.store.notify()
        return [other for replica, other in self.reports.items() if replica != report.replica]

    def leave(self, replica: str) -> None:
        """Forget a replica that is being stopped. Idempotent."""
        report = self.reports.get(replica)
        if report is not None:
            if report.pid and replica not in self._ready_replicas:  # Serve gave it up before it answered a request
                self.assignments.count_lost(replica)
            self._remove_replica(replica)

    def _remove_replica(self, replica: str) -> None:
        report = self.reports.pop(replica)
        if report.pid:
            self.final_counts[replica] = {name: counts.sum_requests() for name, counts in report.counts.items()}
        del self._last_seen_s[replica]
        self.assignments.forget(replica)
        self._ready_replicas.discard(replica)
        self._failures.forget(replica)
        self.state.replicas.remove(replica)
        self.store.commit()
        self._advance_all()

    def _renew_lease(self, replica: str) -> None:
        if replica not in self.reports:
            self._add_replica(replica)
            if replica not in self.state.replicas:
                self.state.replicas.append(replica)
                self.store.commit()
        self._last_seen_s[replica] = self._clock()

    def _add_replica(self, replica: str) -> None:
        self.reports[replica] = ReplicaReport(replica)
        self._last_seen_s[replica] = self._clock()

    # -- the clock --------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Handle events without a report: silent replicas, moved aliases, timeouts."""
        now_s = self._clock()
        self.store.file.retry_writes()
        for replica in [each for each, heard_s in self._last_seen_s.items() if now_s - heard_s > self._lease_s]:
            self.assignments.count_lost(replica)
            self.record_event("replica_lost", reason=f"{replica} did not report for {self._lease_s:g} s")
            self._remove_replica(replica)
        for name in list(self.state.models):
            self._follow_alias(name)
            model = self.state.models[name]
            # Its caller removes it too, but may have called a controller that died meanwhile.
            if model.is_added and model.rollout.phase is Phase.VACANT and model.rollout.refused:
                self.remove_model(name, model.rollout.by, f"it could not be loaded: {model.rollout.reason}")
        self.live.record_rejections()
        self.assignments.tick()
        self._advance_all()
        self.store.notify()  # for what time alone makes possible

    def extend_leases(self, seconds: float) -> None:
        """Extend all leases after this process or its disk stalled: no report could arrive meanwhile."""
        now_s = self._clock()
        self._last_seen_s = {replica: min(now_s, heard_s + seconds) for replica, heard_s in self._last_seen_s.items()}

    def close(self, forget: bool = False) -> None:
        """Wake all waiting callers; `forget` when the endpoint itself is gone. Idempotent."""
        if forget:
            self.store.file.remove()
        self.store.close()

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
            self.store.set_rollout(name, rollout)
        match alias_sync.next_for_alias(model):
            case AbandonRollout(reason):
                self.drop_candidate(name, "registry", reason)
            case alias_sync.PromoteCandidate(why) if self.has_candidate(name):
                self.store.set_rollout(name, replace(model.rollout, kind="promote", by="registry", why=why))
                with suppress(InferenceError):  # the registry is gone since the last query: the next tick tries again
                    self.flip(name)
            case alias_sync.BeginRollout(kind, why):
                is_tried = kind == "follow" and model.deployment.options.get("follow") == "canary"
                goal, shares = (Goal.CANARY, FOLLOWED) if is_tried else (Goal.FLIP, NO_SHARES)
                self.begin_rollout(name, meant, goal, kind=kind, by="registry", why=why, shares=shares)

    def _advance_all(self) -> None:
        for name in list(self.state.models):
            self._advance(name)

    def _advance(self, name: str) -> None:
        """Take the next step of a model's rollout: the only place where one advances automatically."""
        model = self.state.models[name]
        rollout, reports = model.rollout, list(self.reports.values())
        if not reports:  # asleep: a replica has the full time to stage once there is one
            self.store.phases[name].since_s = self._clock()
        if rollout.phase in (Phase.STAGING, Phase.CANARY):
            reports = self.assignments.select(name, reports)
        if rollout.phase is Phase.CANARY:
            guard, evidence = self.collect_evidence(name)
            if reason := find_staging_error(name, rollout, reports) or judge(guard, evidence):
                self.drop_candidate(name, "guard", reason)
            elif rollout.kind == "follow" and evidence.requests >= guard.min_requests and self.has_candidate(name):
                self.flip(name)
        elif rollout.phase in (Phase.STAGING, Phase.FLIPPING):
            waited_s = self._clock() - self.store.phases[name].since_s
            step = self.assignments.prepare(name)
            match step or decide_next_step(name, rollout, reports, waited_s, self._stage_timeout_s):
                case AbandonRollout(reason):
                    self.drop_candidate(name, rollout.by, reason)
                case Proceed() if rollout.phase is Phase.FLIPPING:
                    model.before = None
                    self.store.set_rollout(name, finish_rollout(rollout))
                case Proceed() if rollout.goal is Goal.CANARY:
                    model.metrics = {}
                    self.record_event(rollout.kind, name, rollout.candidate, rollout.stable, rollout.by, rollout.why)
                    self.store.set_rollout(name, open_canary(rollout))
                case Proceed():
                    self.flip(name)

    def collect_evidence(self, name: str) -> tuple[GuardOptions, Evidence]:
        """What the open candidate of a model is judged by."""
        model, collector = self.state.models[name], self.store.phases[name].evidence
        assert collector is not None  # of a canary
        reports = self.assignments.select(name, list(self.reports.values()))
        guard = ModelOptions.parse(model.deployment.options).guard
        return guard, collector.build_evidence(reports, model.metrics, model.rollout.lost_replicas)

    # -- acts -------------------------------------------------------------------------------------------------------

    def add_model(self, deployment: Deployment) -> None:
        """Serve another model; the caller or the next tick begins its version."""
        rollout = Rollout(attempt=self.state.num_attempts)
        model = self.state.models[deployment.name] = ModelState(deployment, rollout, is_added=True)
        self.store.enter_phase(deployment.name, model.rollout)
        self.store.commit()

    def redeploy(self, deployment: Deployment, *, is_on_trial: bool = False) -> None:
        """Serve a present model by another version or alias; reverted if its next rollout is abandoned before it
        answers."""
        model = self.state.models[deployment.name]
        model.before = model.deployment if is_on_trial else None
        model.deployment = deployment
        self.registry_errors.pop(deployment.name, None)  # it concerned the former alias
        self.store.commit()

    def remove_model(self, name: str, by: str, reason: str) -> None:
        """Stop serving a model: the replicas answer its pending requests, then drop it."""
        self.assignments.forget_model(name)
        rollout = self.state.models.pop(name).rollout
        self.state.num_attempts = max(self.state.num_attempts, rollout.attempt)
        self.store.phases.pop(name, None)
        self.registry_errors.pop(name, None)
        self.store.file.delete_weights(name)
        self.record_event("delete", name, 0, rollout.stable, by, reason)
        self.store.commit()

    def begin_rollout(self, name: str, version: int, goal: Goal, **change: Any) -> None:
        """Stage a version of a model whose rollout allows it. change: see `stage_version`"""
        rollout, generation = self.state.models[name].rollout, self.state.generation + 1
        staged = stage_version(rollout, version, goal, generation=generation, **change)
        self.store.set_rollout(name, staged)
        self._advance(name)

    def has_candidate(self, name: str) -> bool:
        """Whether every replica has staged the candidate, also those that joined after it was opened."""
        candidate = self.state.models[name].rollout.candidate
        models = [report.models.get(name) for report in self.assignments.select(name, self.reports.values())]
        return all(model is not None and candidate in model.staged for model in models)

    def flip(self, name: str) -> None:
        """Let the candidate answer everywhere and move the alias to it: both or neither."""
        model = self.state.models[name]
        rollout = model.rollout
        if problem := alias_sync.move_alias(model.deployment, rollout, self.catalogue):
            if rollout.phase is Phase.STAGING:
                self.drop_candidate(name, rollout.by, problem)
                return
            raise InferenceError(503, problem)
        if model.deployment.alias == LATEST and rollout.kind in ("promote", "rollback"):
            model.rejected = [model.meant]  # it stays with the candidate until another version is registered
        self.record_event(rollout.kind, name, rollout.candidate, rollout.stable, rollout.by, rollout.why)
        self.store.set_rollout(name, flip_to_candidate(rollout, self.state.generation + 1))
        self._advance(name)

    def drop_candidate(self, name: str, by: str, reason: str) -> None:
        """Drop the candidate: the stable version answers all requests again, and the model follows what it followed
        before. An alias's version is not tried again automatically, whatever else is staged."""
        model = self.state.models[name]
        rollout = model.rollout
        if model.deployment.is_live:
            self.live.end_canary(name, by, reason)
            return
        if rollout.phase is Phase.CANARY:
            self.record_event("rollback", name, rollout.stable, rollout.candidate, by, reason)
        else:
            model.revert_deployment()
            self.record_event("abandon", name, rollout.candidate, rollout.stable, by, reason)
        rollout = drop_candidate(rollout, reason)
        if rollout.refused and rollout.refused == model.meant:
            model.rejected = [rollout.refused]
        self.store.set_rollout(name, rollout)

    def announce_certificate(self, expires_at: float) -> None:
        """Give the replicas the end of the ingress's certificate, for their metrics."""
        self.store.certificate_expires_at = expires_at
        self.store.commit()


class FailureEvents:
    """Records the models' own errors that replicas report: on requests, and in a load of a version that has answered.

    A caller's mistake may repeat a thousand times a second: each model has at most one event of each kind in
    `RECORD_FAILURE_S`; a replica's log has every error.
    """

    def __init__(self, store: PlanStore) -> None:
        self._store = store
        self._recorded_s: dict[tuple[str, str], float] = {}  # by model and kind
        self._known: dict[tuple[str, str], str] = {}  # the last reference by replica and model

    def receive(self, report: ReplicaReport) -> None:
        for name, model in report.models.items():
            served, failure = self._store.state.models.get(name), model.failure
            for rejected in model.rejected:
                if served is not None and rejected.version and rejected.version == served.rollout.stable:
                    self._record_once(name, "load_failure", rejected.version, rejected.reason)
            if failure is not None and self._known.get((report.replica, name)) != failure.reference:
                self._known[report.replica, name] = failure.reference
                self._record_once(name, "failure", failure.version, failure.describe())

    def _record_once(self, name: str, kind: str, version: int, reason: str) -> None:
        now_s = self._store.clock()
        if now_s - self._recorded_s.get((name, kind), -RECORD_FAILURE_S) >= RECORD_FAILURE_S:
            self._recorded_s[name, kind] = now_s
            self._store.record_event(kind, name, version, reason=reason)

    def forget(self, replica: str) -> None:
        self._known = {key: reference for key, reference in self._known.items() if key[0] != replica}
