"""The controller's part in models that follow a run: a version rejected by one replica is rejected by all, and a pinned
version is on all of them.

Called by the controller with every report, and by the administration. A run may publish twenty bad versions a second,
so rejections are recorded at most every `RECORD_S` seconds for each model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from shoal.serve.controller.plan_store import PlanStore
from shoal.serve.controller.rollout import repoint
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

    # -- queries, and changes by administrators -------------------------------------------------------------------

    def answering(self, name: str) -> list[int]:
        """The versions with which the replicas answer."""
        return [model.version for model in self._store.list_reports(name) if model.version]

    def find_newest(self, name: str) -> int:
        """The newest of these; 0 for none."""
        return max(self.answering(name), default=0)

    def candidates(self, name: str) -> list[int]:
        return [model.candidate for model in self._store.list_reports(name) if model.candidate]

    def available(self, name: str) -> list[int]:
        """The versions that could answer at once on some replica, and soon after on all; ascending."""
        model = self._models[name]
        versions = {version for report in self._store.list_reports(name) for version in report.staged}
        versions |= {model.retained} if self._has(name, model.retained) else set()
        return sorted(versions - set(model.rejected))

    def before(self, name: str, version: int) -> int:
        """The newest available version before this one; 0 for none."""
        return max((each for each in self.available(name) if each < version), default=0)

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
        self._store.record_event("follow", name, NEWEST, model.rollout.stable, by, reason)
        model.rejected = []
        model.last_rejected = None
        model.unrecorded = 0
        self._store.set_rollout(name, repoint(model.rollout, NEWEST, None))

    def reject(self, name: str, version: int, reason: str) -> None:
        """Reject a version on every replica because of a user's metric."""
        answering = self.answering(name)
        has_answered = version in (*answering, *self.candidates(name))
        instead = self.before(name, version) if version in answering else self.find_newest(name)
        rejected = RejectedVersion(version, reason, instead=instead, has_answered=has_answered)
        self._reject(name, self._models[name], rejected)
        self._store.commit()

    def _reject(self, name: str, model: ModelState, rejected: RejectedVersion) -> None:
        model.rejected = sorted([*model.rejected, rejected.version])[-MAX_REJECTED:]
        model.last_rejected = rejected
        model.unrecorded += 1
        if rejected.instead and model.rollout.stable == NEWEST:
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
