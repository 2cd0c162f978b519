"""The controller's part in models that follow a run: a version rejected by one replica is rejected by all, and a pinned
version is on all of them.

Called by the controller with every report, and by the administration. A run may publish twenty bad versions a second,
so rejections are recorded at most every `RECORD_S` seconds for each model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from shoal.serve.controller.rollout import Rollout, repoint
from shoal.serve.controller.state import ModelState, StateFile
from shoal.serve.messages.desired_state import NEWEST, ModelPlan, TrafficShares
from shoal.serve.messages.replica_report import MAX_REJECTED, ModelReport, RejectedVersion, ReplicaReport
from shoal.weights import WeightSnapshot

RECORD_S = 10.0


class LiveControl:
    """The live models of one endpoint.

    file:   retains weights
    record: appends a change to the endpoint's events: kind, model, version, previous, by, reason
    move:   sets a model's rollout
    commit: commits other changes to the desired state
    """

    def __init__(
        self,
        models: Callable[[], Mapping[str, ModelState]],
        reports: Mapping[str, ReplicaReport],
        file: StateFile,
        record: Callable[[str, str, int | None, int | None, str, str], None],
        move: Callable[[str, Rollout], None],
        commit: Callable[[], None],
    ) -> None:
        self._models, self._reports, self._file = models, reports, file
        self._record, self._move, self._commit = record, move, commit
        self._frozen: Counter[str] = Counter()  # the number of concurrent callers

    def complete(self, plan: ModelPlan, model: ModelState) -> ModelPlan:
        """Complete a model's plan with the fields of one that follows a run."""
        if not model.deployment.is_live:
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
        for name, model in self._models().items():
            if model.deployment.is_live and name in report.models:
                for rejected in report.models[name].rejected:
                    is_current = rejected.version and rejected.attempt == model.rollout.attempt
                    if is_current and not _is_known(model, rejected.version):
                        self._reject(name, model, rejected)
                        self._commit()

    def tick(self) -> None:
        """Record the versions rejected since the last entry."""
        for name, model in self._models().items():
            if model.unrecorded and time.time() - model.recorded_at >= RECORD_S:
                self._write_down(name, model)
                self._commit()

    # -- weights ------------------------------------------------------------------------------------------------------

    def store_weights(self, name: str, snapshot: WeightSnapshot) -> None:
        """Store a replica's weights that other replicas need. Idempotent."""
        model = self._models().get(name)
        if model is not None and model.retained == snapshot.version and not self._has(name, snapshot.version):
            self._file.store_weights(name, snapshot)
            self._commit()

    def fetch_weights(self, name: str, version: int) -> WeightSnapshot | None:
        """Weights that a replica lacks; None when another version is retained by now."""
        return self._file.load_weights(name, version)

    def _has(self, name: str, version: int) -> bool:
        return version > 0 and self._file.load_weights(name, version) is not None

    # -- queries, and changes by administrators -------------------------------------------------------------------

    def _reported(self, name: str) -> list[ModelReport]:
        return [report.models[name] for report in self._reports.values() if name in report.models]

    def answering(self, name: str) -> list[int]:
        """The versions with which the replicas answer."""
        return [model.version for model in self._reported(name) if model.version]

    def candidates(self, name: str) -> list[int]:
        """The versions that have a share in the replicas."""
        return [model.candidate for model in self._reported(name) if model.candidate]

    def available(self, name: str) -> list[int]:
        """The versions that could answer at once on some replica, and soon after on all; ascending."""
        model = self._models()[name]
        found = {version for report in self._reported(name) for version in report.staged}
        found |= {model.retained} if self._has(name, model.retained) else set()
        return sorted(found - set(model.rejected))

    def before(self, name: str, version: int) -> int:
        """The newest available version before this one; 0 for none."""
        return max((each for each in self.available(name) if each < version), default=0)

    @contextmanager
    def freeze(self, name: str) -> Iterator[None]:
        """Stop replicas from taking new versions, so that a reported version is still loaded when it is requested."""
        self._frozen[name] += 1
        self._commit()
        try:
            yield
        finally:
            self._frozen[name] -= 1
            self._commit()

    def pin(self, name: str, version: int, by: str, reason: str) -> None:
        """Let every replica answer with an available version until `follow` is called."""
        model = self._models()[name]
        model.retained = version
        self._record("pin", name, version, max(self.answering(name), default=0) or None, by, reason)
        self._move(name, repoint(model.rollout, version, None, time.time()))

    def follow(self, name: str, by: str, reason: str) -> None:
        """Let every replica follow the run again, rejected versions included."""
        model = self._models()[name]
        self._record("follow", name, None, max(model.rollout.stable, 0) or None, by, reason)
        model.rejected, model.last_rejected, model.unrecorded = [], None, 0
        self._move(name, repoint(model.rollout, NEWEST, None, time.time()))

    def share(self, name: str, shares: TrafficShares, kind: str, by: str, reason: str) -> None:
        """Give the run's newest version a share alongside the pinned version."""
        rollout = self._models()[name].rollout
        self._record(kind, name, None, rollout.stable, by, reason)
        self._move(name, repoint(rollout, rollout.stable, shares, time.time()))

    def unshare(self, name: str, kind: str, by: str, reason: str) -> None:
        """Let the pinned version answer all requests again."""
        rollout = self._models()[name].rollout
        self._record(kind, name, rollout.stable, max(self.candidates(name), default=0) or None, by, reason)
        self._move(name, repoint(rollout, rollout.stable, None, time.time()))

    def reject(self, name: str, version: int, reason: str) -> None:
        """Reject a version on every replica because of a user's metric."""
        answering = self.answering(name)
        has_answered = version in (*answering, *self.candidates(name))
        instead = self.before(name, version) if version in answering else max(answering, default=0)
        rejected = RejectedVersion(version, reason, instead=instead, has_answered=has_answered)
        self._reject(name, self._models()[name], rejected)
        self._commit()

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
        answers = rejected.instead or None
        if rejected.has_answered:
            self._record("rollback", name, answers, rejected.version, "guard", rejected.reason + others)
        else:
            self._record("abandon", name, rejected.version, answers, "guard", rejected.reason + others)
        model.unrecorded, model.recorded_at = 0, time.time()


def _is_known(model: ModelState, version: int) -> bool:
    """Whether the version is listed, or was before newer ones displaced it."""
    return version in model.rejected or (len(model.rejected) == MAX_REJECTED and version < model.rejected[0])
