"""Judges when a version is rolled back automatically: pure functions of the counts.

The controller calls `judge` with every report while a canary is open. A replica that follows a run calls it for each
new version, with its own counts. It acts on nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from shoal.serve.messages.replica_report import MAX_FORWARDS, ForwardMedians
from shoal.serve.spec.model_options import GuardOptions

MAX_LOST_REPLICAS = 2  # while a version is loaded, and again while it is a candidate: more are its fault
MIN_FORWARDS = 5  # on either side, of one batch size, before medians are compared
NUM_COMPARED = 9  # batches computed by a live version and the previous one, before one counts as slow


@dataclass(frozen=True)
class Evidence:
    """The counts of a candidate since it was opened, over all replicas.

    requests, errors: those routed to it, shadowed ones too, and those of them that ended with a 5xx of its making
    compared, disagreed: shadowed requests, and those whose outputs differed
    stable, candidate: their forwards
    metrics:          the last values reported for it by users, by name
    lost_replicas:    replicas that died while it was open
    fallbacks:        requests that failed on it and that the previous version then answered: the version is at fault,
                      not the request
    ratios:           its seconds for a batch over those of the previous version for the same batch
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


def judge(guard: GuardOptions, evidence: Evidence) -> str:
    """The reason to roll the candidate back; "" when it may stay."""
    if evidence.lost_replicas > MAX_LOST_REPLICAS:
        return f"{evidence.lost_replicas} replicas died while it answered"
    value = evidence.metrics.get(guard.metric) if guard.metric else None
    if value is not None and not value >= guard.min_value:
        return f"{guard.metric} = {value:g} is below min_value = {guard.min_value:g}"
    if evidence.fallbacks > guard.max_error_rate * evidence.requests:  # from the first on: none happens by chance
        rate = evidence.fallbacks / evidence.requests
        return (
            f"it failed at {evidence.fallbacks} of {evidence.requests} requests, which the version before could answer:"
            f" {rate:.3g} is above max_error_rate = {guard.max_error_rate:g}"
        )
    if len(evidence.ratios) >= NUM_COMPARED and (compared := median(evidence.ratios)) > guard.max_latency_ratio:
        return (
            f"it computes the same batches {compared:.3g} times as long as the version before: above"
            f" max_latency_ratio = {guard.max_latency_ratio:g}"
        )
    if evidence.requests >= guard.min_requests:
        rate = evidence.errors / evidence.requests
        if rate > guard.max_error_rate:
            return (
                f"{evidence.errors} of {evidence.requests} requests failed: {rate:.3g} is above"
                f" max_error_rate = {guard.max_error_rate:g}"
            )
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
