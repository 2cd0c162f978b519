"""The controller's part in live models: what one replica leaves is left by all, and what is pinned is had by all.

Called by the controller with every report, and by the administration. A run may publish twenty versions a second, and
all of them may be bad: what is left is written down at most every `RECORD_S` seconds for each model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from shoal.serve.controller.canary_guard import Evidence, judge
from shoal.serve.controller.state import LiveState, ModelState, StateFile
from shoal.serve.messages.desired_state import LivePlan, TrafficShares
from shoal.serve.messages.replica_report import MAX_REJECTED_VERSIONS, RejectedVersion, ReplicaReport
from shoal.serve.spec.model_options import GuardOptions
from shoal.weights import WeightSnapshot

RECORD_S = 10.0


class LiveControl:
    """Of one endpoint.

    file:   where weights are kept
    record: puts a change into the endpoint's events: kind, model, version, previous, by, reason
    commit: makes what has changed the desired state
    """

    def __init__(
        self,
        models: Callable[[], Mapping[str, ModelState]],
        reports: Mapping[str, ReplicaReport],
        file: StateFile,
        record: Callable[[str, str, int | None, int | None, str, str], None],
        commit: Callable[[], None],
    ) -> None:
        self._models, self._reports, self._file = models, reports, file
        self._record, self._commit = record, commit
        self._frozen: Counter[str] = Counter()  # by how many who ask at once

    def plan(self, name: str, live: LiveState) -> LivePlan:
        """What the replicas are to do about a model."""
        is_kept = self._has(name, live.kept)
        is_frozen = self._frozen[name] > 0
        return LivePlan(live.era, is_frozen, live.pinned, tuple(live.left), live.kept, is_kept, live.newest)

    def heard(self, report: ReplicaReport) -> None:
        """A replica has reported: what it has left, nobody is to answer with."""
        for name, model in self._models().items():
            told = report.models[name].live if name in report.models else None
            if told is not None and told.era == model.live.era:
                for left in told.left:
                    if not _is_known(model.live, left.version):
                        self._leave(name, model.live, left)
                        self._commit()

    def tick(self) -> None:
        """Write down what has been left since the last entry."""
        for name, model in self._models().items():
            if model.live.unrecorded and time.time() - model.live.recorded_at >= RECORD_S:
                self._write_down(name, model.live)
                self._commit()

    # -- weights ------------------------------------------------------------------------------------------------------

    def keep(self, name: str, snapshot: WeightSnapshot) -> None:
        """A replica gives weights that are wanted for others. Idempotent."""
        model = self._models().get(name)
        if model is not None and model.live.kept == snapshot.version and not self._has(name, snapshot.version):
            self._file.store_weights(name, snapshot)
            self._commit()

    def kept(self, name: str, version: int) -> WeightSnapshot | None:
        """What a replica lacks; None when another version is kept by now."""
        return self._file.load_weights(name, version)

    def _has(self, name: str, version: int) -> bool:
        return version > 0 and self._file.load_weights(name, version) is not None

    # -- what is known, and what administrators ask -------------------------------------------------------------------

    def answering(self, name: str) -> list[int]:
        """The version that each replica answers with, of those that have one."""
        models = [report.models[name] for report in self._reports.values() if name in report.models]
        return [model.version for model in models if model.version]

    def candidates(self, name: str) -> list[int]:
        """The version that has a share in each replica, of those in which one has."""
        reports = [report.models[name].live for report in self._reports.values() if name in report.models]
        return [report.candidate for report in reports if report is not None and report.candidate]

    def held(self, name: str) -> list[int]:
        """The versions that could answer at once in some replica, and in all of them soon after; ascending."""
        live = self._models()[name].live
        reports = [report.models[name].live for report in self._reports.values() if name in report.models]
        found = {version for report in reports if report is not None for version in report.held}
        found |= {live.kept} if self._has(name, live.kept) else set()
        return sorted(found - set(live.left))

    def before(self, name: str, version: int) -> int:
        """The newest version before this one that is held; 0 when none is."""
        return max((held for held in self.held(name) if held < version), default=0)

    @contextmanager
    def freeze(self, name: str) -> Iterator[None]:
        """Let no replica take anything new, so that what it reports to hold it still holds when that is asked for."""
        self._frozen[name] += 1
        self._commit()
        try:
            yield
        finally:
            self._frozen[name] -= 1
            self._commit()

    def pin(self, name: str, version: int, by: str, reason: str) -> None:
        """Let every replica answer with a version that is held, until told to follow the run again."""
        live = self._models()[name].live
        previous = max(self.answering(name), default=0)
        live.pinned, live.kept, live.newest = version, version, None
        self._record("pin", name, version, previous or None, by, reason)
        self._commit()

    def follow(self, name: str, by: str, reason: str) -> None:
        """Let every replica follow the run again, whatever has been left."""
        live = self._models()[name].live
        self._record("follow", name, None, live.pinned or None, by, reason)
        live.era, live.pinned, live.left, live.last, live.unrecorded = live.era + 1, 0, [], None, 0
        live.newest = None
        self._commit()

    def share(self, name: str, newest: TrafficShares, kind: str, by: str, reason: str) -> None:
        """Let the newest of the run have a share beside what is pinned."""
        live = self._models()[name].live
        if live.newest is None:
            live.lost_replicas = 0
        live.newest = newest
        self._record(kind, name, None, live.pinned, by, reason)
        self._commit()

    def unshare(self, name: str, by: str, reason: str) -> None:
        """Let what is pinned answer everything again."""
        live = self._models()[name].live
        candidate = max(self.candidates(name), default=0)
        live.newest = None
        self._record("rollback", name, live.pinned, candidate or None, by, reason)
        self._commit()

    def lost_replica(self) -> None:
        """One has died: whatever has a share beside something else may be why."""
        for name, model in self._models().items():
            live = model.live
            if live.newest is not None:
                live.lost_replicas += 1
                if reason := judge(GuardOptions(), Evidence(lost_replicas=live.lost_replicas)):
                    self.unshare(name, "guard", reason)

    def leave(self, name: str, version: int, reason: str) -> None:
        """Let no replica answer with a version, for what a user has measured."""
        answering = self.answering(name)
        has_answered = version in (*answering, *self.candidates(name))
        instead = self.before(name, version) if version in answering else max(answering, default=0)
        self._leave(name, self._models()[name].live, RejectedVersion(version, reason, instead, has_answered))
        self._commit()

    def _leave(self, name: str, live: LiveState, left: RejectedVersion) -> None:
        live.left = sorted([*live.left, left.version])[-MAX_REJECTED_VERSIONS:]
        live.last = left
        live.unrecorded += 1
        if left.instead and not live.pinned:
            live.kept = left.instead
        if time.time() - live.recorded_at >= RECORD_S:
            self._write_down(name, live)

    def _write_down(self, name: str, live: LiveState) -> None:
        left, num_others = live.last, live.unrecorded - 1
        assert left is not None  # whatever is not written down was left
        others = f" (and {num_others} versions before it, since the last entry)" if num_others else ""
        answers = left.instead or None
        if left.has_answered:
            self._record("rollback", name, answers, left.version, "guard", left.reason + others)
        else:
            self._record("abandon", name, left.version, answers, "guard", left.reason + others)
        live.unrecorded, live.recorded_at = 0, time.time()


def _is_known(live: LiveState, version: int) -> bool:
    """Whether it is listed, or has been and has made room for newer ones."""
    return version in live.left or (len(live.left) == MAX_REJECTED_VERSIONS and version < live.left[0])
