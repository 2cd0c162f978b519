"""What rolls a candidate back by itself, and what does not."""

from math import comb
from typing import Any

import pytest

from shoal.serve.controller.canary_guard import (
    NUM_COMPARED,
    Evidence,
    EvidenceCollector,
    compute_p_value,
    judge,
    latency_ratio,
)
from shoal.serve.messages.replica_report import ForwardMedians, ModelReport, ReplicaReport, merge_forward_medians
from shoal.serve.replica.model_statistics import ForwardTimes, ModelStatistics
from shoal.serve.spec.model_options import GuardOptions

GUARD = GuardOptions(min_requests=100, max_disagreement=0.1, metric="reward", min_value=5.0)
FAST: ForwardMedians = {0: (50, 0.001), 3: (50, 0.002)}
SLOW: ForwardMedians = {0: (50, 0.003), 3: (50, 0.006)}


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("", {}),
        ("", {"requests": 99, "errors": 99}),
        ("", {"requests": 1000, "errors": 100, "stable_requests": 1000, "stable_errors": 100}),
        ("", {"requests": 1000, "errors": 120, "stable_requests": 1000, "stable_errors": 100}),
        ("200 of 1000", {"requests": 1000, "errors": 200, "stable_requests": 1000, "stable_errors": 100}),
        ("", {"requests": 100, "errors": 5, "stable_requests": 100}),
        ("of the stable version 0 of 100", {"requests": 100, "errors": 15, "stable_requests": 100}),
        ("", {"requests": 100, "errors": 15, "stable_requests": 10}),
        ("90 of 100 requests failed, of the stable version 0 of 90", {"requests": 100, "errors": 90}),
        ("", {"requests": 100, "stable_requests": 100, "stable_errors": 100}),
        ("", {"compared": 99, "disagreed": 99}),
        ("", {"compared": 100, "disagreed": 10}),
        ("11 of 100 shadowed answers differ", {"compared": 100, "disagreed": 11}),
        ("", {"requests": 100, "stable": FAST, "candidate": FAST}),
        ("computes 3 times as long", {"requests": 100, "stable": FAST, "candidate": SLOW}),
        ("computes 3 times as long", {"requests": 0, "stable": FAST, "candidate": SLOW}),
        ("", {"requests": 99, "stable": FAST, "candidate": {0: (31, 0.003), 3: (32, 0.006)}}),
        ("", {"metrics": {"reward": 5.0, "other": -1.0}}),
        ("reward = 4.9 is below min_value = 5", {"metrics": {"reward": 4.9}}),
        ("reward = nan is below", {"metrics": {"reward": float("nan")}}),
        ("", {"lost_replicas": 2}),
        ("3 replicas died", {"lost_replicas": 3}),
    ],
)
def test_a_candidate_stays_or_goes(word: str, found: dict[str, Any]) -> None:
    reason = judge(GUARD, Evidence(**found))
    assert bool(reason) == bool(word)
    assert word in reason


def test_a_limit_of_the_user_takes_the_place_of_the_comparison() -> None:
    guard = GuardOptions(max_error_rate=0.02)
    assert judge(guard, Evidence(requests=1000, errors=20)) == ""
    found = judge(guard, Evidence(requests=1000, errors=21, stable_requests=1000, stable_errors=21))
    assert "21 of 1000 requests failed: 0.021 is above max_error_rate = 0.02" in found
    assert judge(GuardOptions(max_error_rate=1.0), Evidence(requests=1000, errors=1000)) == ""


@pytest.mark.parametrize("counts", [(3, 10, 1, 12), (9, 9, 0, 3), (1, 2, 0, 1), (40, 200, 5, 150), (7, 50, 1, 50)])
def test_two_error_rates_are_compared_exactly(counts: tuple[int, int, int, int]) -> None:
    errors, requests, stable_errors, stable_requests = counts
    all_errors, total = errors + stable_errors, requests + stable_requests
    at_least = sum(  # the hypergeometric distribution in whole numbers
        comb(requests, count) * comb(stable_requests, all_errors - count)
        for count in range(errors, min(all_errors, requests) + 1)
    )
    assert compute_p_value(*counts) == pytest.approx(at_least / comb(total, all_errors), rel=1e-8)


def test_a_difference_beyond_the_least_number_is_certain_at_once() -> None:
    """Each further term is 0, too: adding up a hundred million of them takes minutes."""
    assert compute_p_value(10**8, 2 * 10**8, 10**7, 2 * 10**8) == 0.0
    assert compute_p_value(0, 0, 0, 0) == compute_p_value(5, 10, 50, 100) == 1.0  # no evidence


@pytest.mark.parametrize(
    ("word", "tried"),
    [
        ("", Evidence()),
        ("", Evidence(requests=1)),
        ("failed at 1 of 1 requests, which the version before could answer", Evidence(requests=1, fallbacks=1)),
        ("", Evidence(requests=50, fallbacks=1)),
        ("1 of 49 requests", Evidence(requests=49, fallbacks=1)),
        ("", Evidence(requests=9, ratios=[9.0] * (NUM_COMPARED - 1))),
        ("9 times as long", Evidence(requests=9, ratios=[9.0] * NUM_COMPARED)),
        ("", Evidence(requests=9, ratios=[2.0] * NUM_COMPARED)),
        (
            "",
            Evidence(requests=9, ratios=[9.0] * (NUM_COMPARED // 2) + [1.0] * (NUM_COMPARED // 2 + 1)),
        ),  # a busy moment
    ],
)
def test_a_live_version_stays_or_goes(word: str, tried: Evidence) -> None:
    reason = judge(GuardOptions(max_latency_ratio=2.0), tried)
    assert bool(reason) == bool(word)
    assert word in reason


def test_disagreement_is_recorded_only_unless_a_limit_is_given() -> None:
    assert judge(GuardOptions(min_requests=1), Evidence(compared=100, disagreed=100)) == ""


def test_only_batches_of_like_size_are_compared() -> None:
    """A candidate with a small share has small batches, whose rows cost more in any version."""
    assert latency_ratio({5: (100, 0.010)}, {0: (100, 0.002)}) is None
    assert latency_ratio({5: (100, 0.010), 0: (4, 0.001)}, {0: (100, 0.002)}) is None  # too few
    assert latency_ratio({5: (100, 0.010), 0: (10, 0.001)}, {0: (100, 0.002)}) == pytest.approx(2.0)


def test_forwards_of_several_replicas_are_weighed_by_their_number() -> None:
    assert merge_forward_medians([{0: (10, 1.0)}, {0: (30, 2.0), 1: (1, 5.0)}]) == {0: (40, 1.75), 1: (1, 5.0)}


def test_evidence_begins_when_the_candidate_is_opened_and_survives_a_replica() -> None:
    counts = {name: ModelStatistics("m") for name in ("a", "b")}

    def heard(name: str) -> ReplicaReport:
        return ReplicaReport(name, models={"m": ModelReport(counts=counts[name].snapshot())})

    def count(name: str, good: int, bad: int, version: int = 2) -> None:
        for status in [200] * good + [500] * bad:
            counts[name].count_request(version, status, 0.1)

    count("a", 10, 10)  # of an earlier canary of this version
    count("a", 10, 10, version=1)
    book = EvidenceCollector("m", 1, 2)
    book.add_report(heard("a"))
    count("a", 5, 2)
    count("a", 7, 3, version=1)
    for version in (1, 2):
        counts["a"].excuse_failure(version)
    book.add_report(heard("a"))
    book.add_report(heard("b"))
    count("b", 3, 2)
    last = heard("b")
    book.add_report(last)
    evidence = book.build_evidence([heard("a")], {}, 0)  # b has died
    assert (evidence.requests, evidence.errors) == (11, 3)
    assert (evidence.stable_requests, evidence.stable_errors) == (9, 2)


class Busy(ForwardTimes):
    """A batch of a version that nobody has asked for yet ends while the times are read, as in a forward's thread."""

    def get_medians(self, version: int) -> ForwardMedians:
        found = super().get_medians(version)
        self.add(version + 100, 1, 0.1)
        return found


def test_a_batch_of_a_new_version_may_end_while_times_are_read() -> None:
    times = Busy()
    for version in (1, 2):
        for seconds in (0.3, 0.1, 0.2):
            times.add(version, 5, seconds)
    assert times.retain_medians([1, 2, 3]) == {1: {2: (3, 0.2)}, 2: {2: (3, 0.2)}}
