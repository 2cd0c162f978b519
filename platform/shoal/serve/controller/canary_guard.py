"""Judges when a version is rolled back automatically: pure functions of the counts since it was opened.

The controller calls `judge` with every report while a canary is open, for which `EvidenceCollector` sums up what the
replicas counted. A replica that follows a run calls it for each new version, with its own counts. It acts on nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, lgamma
from statistics import median
from typing import NamedTuple

from shoal.serve.messages.replica_report import (
    MAX_FORWARDS,
    ForwardMedians,
    ModelReport,
    ReplicaReport,
    merge_forward_medians,
)
from shoal.serve.spec.model_options import GuardOptions

MAX_LOST_REPLICAS = 2  # while a version is loaded, and again while it is a candidate: more are its fault
MIN_FORWARDS = 5  # on either side, of one batch size, before medians are compared
NUM_COMPARED = 9  # batches computed by a live version and the previous one, before one counts as slow
MAX_FALLBACK_RATE = 0.02  # of a live version, unless the user gives a limit
# A canary is judged many times. At this bound, fewer than 1 in 100 candidates that fail as often as the stable version
# are rolled back within 20,000 requests (simulated, judged at each error).
MAX_P_VALUE = 1e-4


@dataclass(frozen=True)
class Evidence:
    """The counts of a candidate since it was opened, over all replicas.

    requests, errors: those routed to it, shadowed ones too, and those of them that ended with a 5xx of its making;
                      without those that fail on both versions
    compared, disagreed: shadowed requests, and those whose outputs differed
    stable, candidate: their forwards
    metrics:          the last values reported for it by users, by name
    lost_replicas:    replicas that died while it was open
    fallbacks:        requests that failed on it and that the previous version then answered: the version is at fault,
                      not the request
    ratios:           its seconds for a batch over those of the previous version for the same batch
    stable_requests, stable_errors: as `requests` and `errors`, of the stable version
    """

    requests: int = 0
    errors: int = 0
    compared: int = 0
    disagreed: int = 0
    stable: ForwardMedians = field(default_factory=dict)
    candidate: ForwardMedians = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    lost_replicas: int = 0
    fallbacks: int = 0
    ratios: Sequence[float] = ()
    stable_requests: int = 0
    stable_errors: int = 0


def judge(guard: GuardOptions, evidence: Evidence) -> str:
    """The reason to roll the candidate back; "" when it may stay."""
    if evidence.lost_replicas > MAX_LOST_REPLICAS:
        return f"{evidence.lost_replicas} replicas died while it answered"
    value = evidence.metrics.get(guard.metric) if guard.metric else None
    if value is not None and not value >= guard.min_value:
        return f"{guard.metric} = {value:g} is below min_value = {guard.min_value:g}"
    limit = MAX_FALLBACK_RATE if guard.max_error_rate is None else guard.max_error_rate
    if evidence.fallbacks > limit * evidence.requests:  # from the first on: none happens by chance
        rate = evidence.fallbacks / evidence.requests
        return (
            f"it failed at {evidence.fallbacks} of {evidence.requests} requests, which the version before could answer:"
            f" {rate:.3g} is above max_error_rate = {limit:g}"
        )
    if len(evidence.ratios) >= NUM_COMPARED and (compared := median(evidence.ratios)) > guard.max_latency_ratio:
        return (
            f"it computes the same batches {compared:.3g} times as long as the version before: above"
            f" max_latency_ratio = {guard.max_latency_ratio:g}"
        )
    if evidence.requests >= guard.min_requests and (reason := _judge_errors(guard, evidence)):
        return reason
    # Its forwards count even if no request was answered: a version that is slow enough misses every deadline.
    num_forwards = sum(count for count, _ in evidence.candidate.values())
    if evidence.requests >= guard.min_requests or num_forwards >= min(guard.min_requests, MAX_FORWARDS):
        ratio = latency_ratio(evidence.stable, evidence.candidate)
        if ratio is not None and ratio > guard.max_latency_ratio:
            return f"it computes {ratio:.3g} times as long: above max_latency_ratio = {guard.max_latency_ratio:g}"
    if guard.max_disagreement is not None and evidence.compared >= guard.min_requests:
        share = evidence.disagreed / evidence.compared
        if share > guard.max_disagreement:
            return (
                f"{evidence.disagreed} of {evidence.compared} shadowed answers differ: {share:.3g} is above"
                f" max_disagreement = {guard.max_disagreement:g}"
            )
    return ""


def _judge_errors(guard: GuardOptions, evidence: Evidence) -> str:
    requests, errors = evidence.requests, evidence.errors
    if guard.max_error_rate is not None:
        rate, limit = errors / requests, guard.max_error_rate
        return (
            f"{errors} of {requests} requests failed: {rate:.3g} is above max_error_rate = {limit:g}"
            if rate > limit
            else ""
        )
    # The stable version answered each request that only the candidate failed at: all its evidence at a share of 100 %.
    stable_requests = max(evidence.stable_requests, errors)
    if compute_p_value(errors, requests, evidence.stable_errors, stable_requests) > MAX_P_VALUE:
        return ""
    return (
        f"{errors} of {requests} requests failed, of the stable version {evidence.stable_errors} of {stable_requests}:"
        " a difference that is not chance"
    )


def compute_p_value(errors: int, requests: int, stable_errors: int, stable_requests: int) -> float:
    """The probability of at least so many of all errors among `requests`, were both error rates equal.

    Fisher's exact test, one-sided: exact for any number of requests.
    """
    if errors * stable_requests <= stable_errors * requests:
        return 1.0
    all_errors = errors + stable_errors
    num_cases = _log_binomial(requests + stable_requests, all_errors)
    total = 0.0
    for count in range(errors, min(all_errors, requests) + 1):  # the terms fall: the expected number is below `errors`
        among = _log_binomial(requests, count) + _log_binomial(stable_requests, all_errors - count)
        term = exp(among - num_cases)
        total += term
        if term <= 1e-9 * total:  # both are 0 where the first is below the least number
            break
    return total


def _log_binomial(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


def latency_ratio(stable: ForwardMedians, candidate: ForwardMedians) -> float | None:
    """The candidate's compute time over the stable version's, for batches of equal size; None without such batches.

    Only equal sizes compare: a candidate with a small share has small batches, whose rows cost more in any version.
    """
    weighted, weights = 0.0, 0
    for size, (count, median_s) in candidate.items():
        beside, beside_s = stable.get(size, (0, 0.0))
        weight = min(count, beside)
        if weight >= MIN_FORWARDS and beside_s > 0.0:
            weighted += weight * median_s / beside_s
            weights += weight
    return weighted / weights if weights else None


class OutcomeCounts(NamedTuple):
    """The counts of one version; requests that fail on both versions are in neither of the first two."""

    requests: int = 0
    errors: int = 0
    compared: int = 0
    disagreed: int = 0


CanaryCounts = tuple[OutcomeCounts, OutcomeCounts]  # the candidate's, the stable version's


class EvidenceCollector:
    """The counts of one model's candidate and of the stable version since it was opened; a new one for each canary.

    A replica's counts begin when it begins to serve a model. Counts from before the canary opened, or from before a
    later replica's first report, are subtracted. The counts of a dead replica remain.
    """

    def __init__(self, model: str, stable: int, candidate: int) -> None:
        self._model = model
        self._stable = stable
        self._candidate = candidate
        self._before: dict[str, CanaryCounts] = {}
        self._now: dict[str, CanaryCounts] = {}

    def add_report(self, report: ReplicaReport) -> None:
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

    def _sum_since_opening(self, side: int) -> OutcomeCounts:
        since = [
            [now - before for now, before in zip(counts[side], self._before[replica][side], strict=True)]
            for replica, counts in self._now.items()
        ]
        return OutcomeCounts(*map(sum, zip(*since, strict=True)))


def _count_version(report: ModelReport, version: int) -> OutcomeCounts:
    counts = report.counts.versions.get(version) if report.counts is not None else None
    if counts is None:
        return OutcomeCounts()
    excused = counts.failed_on_both
    return OutcomeCounts(counts.requests - excused, counts.errors - excused, counts.compared, counts.disagreed)
