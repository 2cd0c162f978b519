"""The replicas' counts of a candidate since it was opened.

Owned by the controller. A replica's counts begin when it begins to serve a model. Counts from before the canary opened,
or from before a later replica's first report, are subtracted. The counts of a dead replica remain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.serve.controller.canary_guard import Evidence
from shoal.serve.messages.metrics_snapshot import count_requests_and_errors
from shoal.serve.messages.replica_report import ModelReport, ReplicaReport, merge_forward_medians

CanaryCounts = tuple[int, int, int, int]  # requests, errors, compared, disagreed
NO_COUNTS: CanaryCounts = (0, 0, 0, 0)


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
            counted = _count_version(of_model, self._candidate)
            self._before.setdefault(report.replica, counted)
            self._now[report.replica] = counted

    def build_evidence(
        self, replicas: Iterable[ReplicaReport], metrics: Mapping[str, float], lost_replicas: int
    ) -> Evidence:
        """Sum up the evidence; the forwards are those of the living `replicas`."""
        requests, errors, compared, disagreed = NO_COUNTS
        for replica, now in self._now.items():
            before = self._before[replica]
            requests += now[0] - before[0]
            errors += now[1] - before[1]
            compared += now[2] - before[2]
            disagreed += now[3] - before[3]
        models = [report.models[self._model] for report in replicas if self._model in report.models]
        return Evidence(
            requests,
            errors,
            compared,
            disagreed,
            merge_forward_medians(model.forwards.get(self._stable, {}) for model in models),
            merge_forward_medians(model.forwards.get(self._candidate, {}) for model in models),
            metrics,
            lost_replicas,
        )


def _count_version(report: ModelReport, version: int) -> CanaryCounts:
    counts = report.counts["versions"].get(str(version)) if report.counts is not None else None
    if counts is None:
        return NO_COUNTS
    return *count_requests_and_errors(counts), counts["compared"], counts["disagreed"]
