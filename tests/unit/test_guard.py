"""What rolls a candidate back by itself, and what does not."""

from typing import Any

import pytest

from shoal.serve.controller.canary_evidence import EvidenceCollector
from shoal.serve.controller.canary_guard import NUM_COMPARED, Evidence, judge, latency_ratio
from shoal.serve.messages.replica_report import ForwardMedians, ModelReport, ReplicaReport, merge_forward_medians
from shoal.serve.replica.model_statistics import ModelStatistics
from shoal.serve.spec.model_options import GuardOptions

GUARD = GuardOptions(min_requests=100, max_disagreement=0.1, metric="reward", min_value=5.0)
FAST: ForwardMedians = {0: (50, 0.001), 3: (50, 0.002)}
SLOW: ForwardMedians = {0: (50, 0.003), 3: (50, 0.006)}


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("", {}),
        ("", {"requests": 99, "errors": 99}),
        ("", {"requests": 1000, "errors": 20}),
        ("21 of 1000 requests failed", {"requests": 1000, "errors": 21}),
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
    reason = judge(GuardOptions(max_error_rate=0.02, max_latency_ratio=2.0), tried)
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

    def count(name: str, good: int, bad: int) -> None:
        for status in [200] * good + [500] * bad:
            counts[name].count_request(2, status, 0.1)

    count("a", 10, 10)  # of an earlier canary of this version
    book = EvidenceCollector("m", 1, 2)
    book.add_report(heard("a"))
    count("a", 5, 1)
    book.add_report(heard("a"))
    book.add_report(heard("b"))
    count("b", 3, 2)
    last = heard("b")
    book.add_report(last)
    evidence = book.build_evidence([heard("a")], {}, 0)  # b has died
    assert (evidence.requests, evidence.errors) == (11, 3)
