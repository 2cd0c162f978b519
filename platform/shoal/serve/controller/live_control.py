"""The controller's part in models that follow a run: a version rejected by one replica is rejected by all, and a pinned
version is on all of them.

Called by the controller with every report, and by `admin_api` with the changes of such models: each takes effect as it
is made, since every replica loads its own versions. A run may publish twenty bad versions a second, so rejections are
recorded at most every `RECORD_S` seconds for each model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from shoal.errors import InferenceError
from shoal.serve.controller.canary_guard import Evidence, judge
from shoal.serve.controller.change_request import (
    ASKED,
    ChangeRequest,
    append_shares,
    require_from_version,
    require_guard_metric,
)
from shoal.serve.controller.plan_store import PlanStore
from shoal.serve.controller.rollout import Phase, repoint
from shoal.serve.controller.state import ModelState
from shoal.serve.messages.desired_state import NEWEST, ModelPlan
from shoal.serve.messages.replica_report import MAX_REJECTED, RejectedVersion, ReplicaReport
from shoal.weights import WeightSnapshot

RECORD_S = 10.0


class LiveControl:
    """The live models of one endpoint."""

    def __init__(self, store: PlanStore) -> None:
        self._store = store
        self._models = store.state.models
        self._frozen: Counter[str] = Counter()  # the number of concurrent callers

    def complete(self, plan: ModelPlan, model: ModelState) -> ModelPlan:
        """Complete a model's plan with the fields of one that follows a run."""
        if plan.registry:
            return plan
        return replace(
            plan,
            rejected=tuple(model.rejected),
            is_frozen=self._frozen[plan.name] > 0,
            retained=model.retained,
            is_retained=self._has(plan.name, model.retained),
        )

    def receive(self, report: ReplicaReport) -> None:
        """Take in a replica's report: a version that it rejected is rejected for all."""
        for name, model in self._models.items():
            if model.deployment.is_live and name in report.models:
                for rejected in report.models[name].rejected:
                    version, known = rejected.version, model.rejected
                    is_known = version in known or (  # or was before newer ones displaced it
                        len(known) == MAX_REJECTED and version < known[0]
                    )
                    if version and rejected.attempt == model.rollout.attempt and not is_known:
                        self._reject(name, model, rejected)
                        self._store.commit()

    def record_rejections(self) -> None:
        """Record the versions rejected since the last entry."""
        for name, model in self._models.items():
            if model.unrecorded and time.time() - model.recorded_at >= RECORD_S:
                self._write_down(name, model)
                self._store.commit()

    # -- weights ------------------------------------------------------------------------------------------------------

    def store_weights(self, name: str, snapshot: WeightSnapshot) -> None:
        """Store a replica's weights that other replicas need. Idempotent."""
        model = self._models.get(name)
        if model is not None and model.retained == snapshot.version and not self._has(name, snapshot.version):
            self._store.file.store_weights(name, snapshot)
            self._store.commit()

    def fetch_weights(self, name: str, version: int) -> WeightSnapshot | None:
        """Weights that a replica lacks; None when another version is retained by now."""
        return self._store.file.load_weights(name, version)

    def _has(self, name: str, version: int) -> bool:
        return version > 0 and self._store.file.load_weights(name, version) is not None

    # -- queries ------------------------------------------------------------------------------------------------------

    def answering(self, name: str) -> list[int]:
        """The versions with which the replicas answer."""
        return [model.version for model in self._store.list_reports(name) if model.version]

    def find_newest(self, name: str) -> int:
        """The newest of these; 0 for none."""
        return max(self.answering(name), default=0)

    def find_candidate(self, name: str) -> int:
        """The newest version that gets a share on some replica; 0 for none."""
        return max((model.candidate for model in self._store.list_reports(name)), default=0)

    def available(self, name: str) -> list[int]:
        """The versions that could answer at once on some replica, and soon after on all; ascending."""
        model = self._models[name]
        versions = {version for report in self._store.list_reports(name) for version in report.staged}
        versions |= {model.retained} if self._has(name, model.retained) else set()
        return sorted(versions - set(model.rejected))

    def before(self, name: str, version: int) -> int:
        """The newest available version before this one; 0 for none."""
        return max((each for each in self.available(name) if each < version), default=0)

    # -- changes by administrators ------------------------------------------------------------------------------------

    async def deploy(self, change: ChangeRequest, by: str, kind: str) -> None:
        """Refuse: the run selects. Raises InferenceError (409)."""
        problem = f"model {change.model!r} follows the weights of a run, which selects its versions and its options"
        remedy = "roll back to pin it to a retained version, promote to follow the run again"
        raise InferenceError(409, f"{problem}: {remedy}")

    async def open_canary(self, change: ChangeRequest, by: str) -> None:
        """Give the newest version other shares alongside a pinned one: without one, the version that answers; 0 ends a
        shadow."""
        name = change.model
        self._refuse_version(change, f": only those can get a share, and no version by its number. Name {name} alone")
        if self._models[name].rollout.phase is not Phase.CANARY:
            change.require_share()
            if self._models[name].rollout.is_following:
                await self._select_and_pin(change, by, change.reason, stay=True)
            if self._store.get_model(name).rollout.is_following:
                raise InferenceError(409, f"model {name!r} follows its run again")
        rollout = self._models[name].rollout
        if change.ends_shadow and rollout.shares.is_shadow:
            self.end_canary(name, by, change.reason or ASKED)
            return
        shares = change.shares_over(rollout.shares)
        self._store.record_event(change.action, name, 0, rollout.stable, by, append_shares(change.reason, shares))
        shared = repoint(rollout, rollout.stable, shares)
        self._store.set_rollout(name, replace(shared, kind=change.action, by=by, why=change.reason))

    async def promote(self, change: ChangeRequest, by: str) -> None:
        """Follow the run, rejected versions included."""
        name, model = change.model, self._models[change.model]
        remedy = f"promote {name}, or roll it back to {change.version_ref} to pin it"
        self._refuse_version(change, f", and no version by its number: {remedy}")
        if model.rollout.is_following and not model.rejected:
            raise InferenceError(409, f"model {name!r} follows the weights of its run already, and none are rejected")
        self.follow(name, by, change.reason)

    async def rollback(self, change: ChangeRequest, by: str) -> None:
        """Pin the named version, or the one before; without a name, a candidate loses its shares."""
        name, reason = change.model, change.reason or ASKED
        rollout = self._models[name].rollout
        if change.version_ref or rollout.phase is not Phase.CANARY:
            await self._select_and_pin(change, by, reason)
        elif change.from_version == rollout.stable:
            what = f"leave the newest weights of its run, not version {rollout.stable}, which is pinned"
            raise InferenceError(409, f"a rollback of {name!r} would {what}: see its status")
        else:
            self.end_canary(name, by, reason)

    def record_metric(self, change: ChangeRequest) -> None:
        """Judge the version that answers, an earlier one (no rollback then returns to it), or the candidate."""
        name, rollout = change.model, self._models[change.model].rollout
        guard = require_guard_metric(change, self._models[name].deployment.options)
        assert change.value is not None
        reason = judge(guard, Evidence(metrics={change.metric: change.value}))
        is_open = rollout.phase is Phase.CANARY
        version = self.find_newest(name)
        if is_open:
            version = self.find_candidate(name) or version
        if change.version_ref.isdigit():
            version = int(change.version_ref)
        is_pinned = rollout.stable == version or not (rollout.is_following or is_open)
        if reason and version in self.available(name) and not is_pinned:
            if version in self.answering(name) and not self.before(name, version):
                raise InferenceError(409, f"{reason}; but no version of {name!r} before {version} is available")
            self.reject(name, version, reason)

    def _refuse_version(self, change: ChangeRequest, problem: str) -> None:
        if change.version_ref:
            raise InferenceError(409, f"model {change.model!r} follows the newest weights of its run{problem}")

    async def _select_and_pin(self, change: ChangeRequest, by: str, reason: str, stay: bool = False) -> None:
        """Pin the named version or the one before that which answers, and wait until it answers everywhere.

        stay: pin the version that answers
        """
        name, store = change.model, self._store
        with self.freeze(name):
            if not await store.wait_until(store.is_applied_everywhere, change.timeout_s):
                raise InferenceError(503, f"not every replica reported its versions after {change.timeout_s:g} s")
            if name not in self._models:
                raise InferenceError(409, f"model {name!r} was deleted meanwhile")
            newest = self.find_newest(name)
            require_from_version(change, newest)
            version = newest if stay else self._select_version(name, change.version_ref)
            if not version:
                raise InferenceError(409, f"model {name!r} has no weights yet")
            self.pin(name, version, by, reason)

        def everywhere() -> bool:
            return name not in self._models or set(self.answering(name)) == {version}

        if not await store.wait_until(everywhere, change.timeout_s):
            late = sorted(set(self.answering(name)) - {version})
            problem = f"version {version} of {name!r} did not answer everywhere after {change.timeout_s:g} s"
            raise InferenceError(503, f"{problem}: some replicas still answer with {late}")

    def _select_version(self, name: str, requested: str) -> int:
        """The named version, or the one before the version that answers. Raises InferenceError (409)."""
        available, answering = self.available(name), self.find_newest(name)
        there = ", ".join(map(str, available)) or "none"
        if requested and requested not in map(str, available):
            raise InferenceError(409, f"version {requested} of {name!r} is not available; available: {there}")
        version = int(requested) if requested else self.before(name, answering)
        if not version:
            problem = f"follows the weights of a run and has no version before {answering}; available: {there}"
            raise InferenceError(409, f"model {name!r} {problem}. To stay with one of them, name it")
        return version

    @contextmanager
    def freeze(self, name: str) -> Iterator[None]:
        """Stop replicas from taking new versions, so that a reported version is still loaded when it is requested."""
        self._frozen[name] += 1
        self._store.commit()
        try:
            yield
        finally:
            self._frozen[name] -= 1
            self._store.commit()

    def pin(self, name: str, version: int, by: str, reason: str) -> None:
        """Let every replica answer with an available version until `follow` is called."""
        model = self._models[name]
        model.retained = version
        self._store.record_event("pin", name, version, self.find_newest(name), by, reason)
        self._store.set_rollout(name, repoint(model.rollout, version, None))

    def follow(self, name: str, by: str, reason: str) -> None:
        """Let every replica follow the run again, rejected versions included."""
        model = self._models[name]
        self._store.record_event("follow", name, 0, model.rollout.stable, by, reason)
        model.rejected = []
        model.last_rejected = None
        model.unrecorded = 0
        self._store.set_rollout(name, repoint(model.rollout, NEWEST, None))

    def end_canary(self, name: str, by: str, reason: str) -> None:
        """Let the pinned version answer all requests again."""
        rollout = self._models[name].rollout
        self._store.record_event("rollback", name, rollout.stable, self.find_candidate(name), by, reason)
        self._store.set_rollout(name, repoint(rollout, rollout.stable, None))

    def reject(self, name: str, version: int, reason: str) -> None:
        """Reject a version on every replica because of a user's metric."""
        answering = self.answering(name)
        has_answered = any(version in (model.version, model.candidate) for model in self._store.list_reports(name))
        instead = self.before(name, version) if version in answering else self.find_newest(name)
        rejected = RejectedVersion(version, reason, instead=instead, has_answered=has_answered)
        self._reject(name, self._models[name], rejected)
        self._store.commit()

    def _reject(self, name: str, model: ModelState, rejected: RejectedVersion) -> None:
        model.rejected = sorted([*model.rejected, rejected.version])[-MAX_REJECTED:]
        model.last_rejected = rejected
        model.unrecorded += 1
        if rejected.instead and model.rollout.is_following:
            model.retained = rejected.instead
        if time.time() - model.recorded_at >= RECORD_S:
            self._write_down(name, model)

    def _write_down(self, name: str, model: ModelState) -> None:
        rejected, num_others = model.last_rejected, model.unrecorded - 1
        assert rejected is not None  # of versions not yet recorded
        others = f" (and {num_others} versions before it, since the last entry)" if num_others else ""
        reason = rejected.reason + others
        if rejected.has_answered:
            self._store.record_event("rollback", name, rejected.instead, rejected.version, "guard", reason)
        else:
            self._store.record_event("abandon", name, rejected.version, rejected.instead, "guard", reason)
        model.unrecorded, model.recorded_at = 0, time.time()
