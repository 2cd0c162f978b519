"""The replicas' counts of a candidate and of the stable version since the candidate was opened.

Owned by the controller. A replica's counts begin when it begins to serve a model. Counts from before the canary opened,
or from before a later replica's first report, are subtracted. The counts of a dead replica remain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from shoal.serve.controller.canary_guard import Evidence
from shoal.serve.messages.metrics_snapshot import count_requests_and_errors
from shoal.serve.messages.replica_report import ModelReport, ReplicaReport, merge_forward_medians


class VersionCounts(NamedTuple):
    """The counts of one version; requests that fail on both versions are in neither of the first two."""

    requests: int = 0
    errors: int = 0
    compared: int = 0
    disagreed: int = 0


CanaryCounts = tuple[VersionCounts, VersionCounts]  # the candidate's, the stable version's


class EvidenceCollector:
    """The counts of one model's candidate; a new one for each canary."""

    def __init__(self, model: str, stable: int, candidate: int) -> None:
        self._model, self._stable, self._candidate = model, stable, candidate
        self._before: dict[str, CanaryCounts] = {}
        self._now: dict[str, CanaryCounts] = {}

    def add_report(self, report: ReplicaReport) -> None:
        """Take in a replica's report."""
        of_model = report.models.get(self._model)
        if of_model is not None:
            counted = _count_version(of_model, self._candidate), _count_version(of_model, self._stable)
            self._before.setdefault(report.replica, counted)
            self._now[report.replica] = counted

    def build_evidence(
        self, replicas: Iterable[ReplicaReport], metrics: Mapping[str, float], lost_replicas: int
    ) -> Evidence:
        """Sum up the evidence; the forwards are those of the living `replicas`."""
        candidate, stable = self._sum_since_opening(0), self._sum_since_opening(1)
        models = [report.models[self._model] for report in replicas if self._model in report.models]
        return Evidence(
            *candidate,
            merge_forward_medians(model.forwards.get(self._stable, {}) for model in models),
            merge_forward_medians(model.forwards.get(self._candidate, {}) for model in models),
            metrics,
            lost_replicas,
            stable_requests=stable.requests,
            stable_errors=stable.errors,
        )

    def _sum_since_opening(self, side: int) -> VersionCounts:
        since = [
            [now - before for now, before in zip(counts[side], self._before[replica][side], strict=True)]
            for replica, counts in self._now.items()
        ]
        return VersionCounts(*map(sum, zip(*since, strict=True)))


def _count_version(report: ModelReport, version: int) -> VersionCounts:
    counts = report.counts["versions"].get(str(version)) if report.counts is not None else None
    if counts is None:
        return VersionCounts()
    requests, errors = count_requests_and_errors(counts)
    excused = counts["failed_on_both"]
    return VersionCounts(requests - excused, errors - excused, counts["compared"], counts["disagreed"])


RECORD_S = 600.0


class FailureEvents:
    """record: appends an event, as `EndpointController.record_event`."""

    def __init__(self, record: Callable[..., None], clock: Callable[[], float]) -> None:
        self._record, self._clock = record, clock
        self._recorded_s: dict[tuple[str, str], float] = {}  # by model and kind
        self._known: dict[tuple[str, str], str] = {}  # the last reference by replica and model

    def receive(self, report: ReplicaReport, stable: Mapping[str, int]) -> None:
        """Take in a replica's report. stable: the answering version of each model"""
        for name, model in report.models.items():
            for rejected in model.rejected:
                if rejected.version and rejected.version == stable.get(name):
                    self._record_once(name, "load_failure", rejected.version, rejected.reason)
            failure = model.failure
            if failure is not None and self._known.get((report.replica, name)) != failure.reference:
                self._known[report.replica, name] = failure.reference
                self._record_once(name, "failure", failure.version, failure.describe())

    def _record_once(self, name: str, kind: str, version: int, reason: str) -> None:
        now_s = self._clock()
        if now_s - self._recorded_s.get((name, kind), -RECORD_S) >= RECORD_S:
            self._recorded_s[name, kind] = now_s
            self._record(kind, name, version, reason=reason)

    def forget(self, replica: str) -> None:
        """Forget a replica that has gone."""
        self._known = {key: reference for key, reference in self._known.items() if key[0] != replica}
