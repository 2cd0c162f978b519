"""What a model's statistics count, and that replicas' counts add up."""

import json
import math
import pickle
import threading
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.serve.controller.status import build_version_status
from shoal.serve.messages.metrics_snapshot import (
    count_requests_and_errors,
    estimate_quantile,
    merge_snapshots,
    subtract_histogram,
)
from shoal.serve.replica.model_statistics import MAX_VERSIONS, ROWS, SECONDS, Histogram, ModelStatistics


@dataclass
class Report:
    """The part of a Batch that is counted."""

    rows: int
    computed_s: float
    version: int


def test_a_request_is_counted_under_its_version() -> None:
    statistics = ModelStatistics("m")
    statistics.count_request(3, 200, 0.010, queued_s=0.002, computed_s=0.005, rows=4)
    statistics.count_request(3, 200, 0.020, queued_s=0.001, computed_s=0.004, rows=1)
    statistics.count_request(3, 500, 0.030)
    statistics.count_request(4, 200, 0.001, rows=1)
    snapshot = statistics.snapshot()
    third = snapshot["versions"]["3"]
    assert third["inference_count"] == 5
    assert third["statuses"] == {"200": 2, "500": 1}
    assert third["inference_stats"] == {
        "success": {"count": 2, "ns": 30_000_000},
        "fail": {"count": 1, "ns": 30_000_000},
        "queue": {"count": 2, "ns": 3_000_000},
        "compute_infer": {"count": 2, "ns": 9_000_000},
    }
    assert third["last_inference"] > 1_600_000_000_000
    assert sum(third["request_s"]["counts"]) == 2
    assert snapshot["versions"]["4"]["inference_count"] == 1
    assert sum(snapshot["queue_s"]["counts"]) == 3


def test_a_batch_is_counted_under_its_version_and_size() -> None:
    statistics = ModelStatistics("m")
    for rows, computed_s in [(4, 0.5), (1, 0.25), (4, 0.5)]:
        statistics.count_batch(Report(rows, computed_s, 7))
    snapshot = statistics.snapshot()
    version = snapshot["versions"]["7"]
    assert version["execution_count"] == 3
    assert version["batch_stats"] == [
        {"batch_size": 1, "compute_infer": {"count": 1, "ns": 250_000_000}},
        {"batch_size": 4, "compute_infer": {"count": 2, "ns": 1_000_000_000}},
    ]
    assert snapshot["batch_rows"]["sum"] == 9
    assert snapshot["compute_s"]["sum"] == pytest.approx(1.25)


def test_what_reached_no_version_is_counted_by_status() -> None:
    statistics = ModelStatistics("m")
    for status in (429, 422, 429):
        statistics.count_request(0, status, 0.001)
    assert statistics.snapshot()["refused"] == {"422": 1, "429": 2}
    assert statistics.snapshot()["versions"] == {}


def test_what_serves_and_what_waits() -> None:
    statistics = ModelStatistics("m", pending=lambda: 5)
    statistics.set_serving(1)
    statistics.set_serving(1, candidate=2, percent=10.0)
    statistics.set_serving(2)
    statistics.count_shadow(3, disagreed=False)
    statistics.count_shadow(3, disagreed=True)
    snapshot = statistics.snapshot()
    assert snapshot["serving"] == {"stable": 2, "candidate": 0, "percent": 0.0}
    assert (snapshot["swaps"], snapshot["pending"]) == (2, 5)
    assert (snapshot["versions"]["3"]["compared"], snapshot["versions"]["3"]["disagreed"]) == (2, 1)
    statistics.count_shadow_failure(3)
    assert statistics.snapshot()["versions"]["3"]["shadow_failed"] == 1
    assert count_requests_and_errors(statistics.snapshot()["versions"]["3"]) == (3, 1)


def test_however_many_versions_come_the_newest_are_kept_apart_and_nothing_is_lost() -> None:
    statistics = ModelStatistics("m", live=True)
    num_versions = 3 * MAX_VERSIONS
    for version in range(1, num_versions + 1):
        statistics.count_request(1, 200, 0.001, rows=1)  # the first stays in use
        statistics.count_request(version, 200, 0.001, rows=2)
        statistics.count_batch(Report(2, 0.001, version))
        statistics.count_shadow(version, disagreed=True)
    snapshot = statistics.snapshot()
    assert len(snapshot["versions"]) == MAX_VERSIONS
    assert {"1", str(num_versions)} <= snapshot["versions"].keys()
    assert snapshot["versions"]["1"]["inference_count"] == num_versions + 2  # in use all the time, it never left
    every = [snapshot["older"], *snapshot["versions"].values()]
    assert sum(each["inference_count"] for each in every) == 3 * num_versions
    assert sum(each["execution_count"] for each in every) == num_versions
    assert sum(each["disagreed"] for each in every) == num_versions
    assert sum(sum(each["request_s"]["counts"]) for each in every) == 2 * num_versions
    assert sum(size["compute_infer"]["count"] for each in every for size in each["batch_stats"]) == num_versions


def test_batches_of_several_threads_are_all_counted() -> None:
    statistics, num_batches = ModelStatistics("m"), 5000

    def compute() -> None:
        for _ in range(num_batches):
            statistics.count_batch(Report(1, 0.0, 1))

    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    version = statistics.snapshot()["versions"]["1"]
    assert version["execution_count"] == 4 * num_batches == version["batch_stats"][0]["compute_infer"]["count"]


def test_a_snapshot_is_plain_data_and_stays_as_it_was() -> None:
    statistics = ModelStatistics("m")
    statistics.count_request(1, 200, 0.001, rows=1)
    snapshot = statistics.snapshot()
    before = json.dumps(snapshot)
    assert json.loads(before) == snapshot == pickle.loads(pickle.dumps(snapshot))
    statistics.count_request(1, 200, 0.001, rows=1)
    statistics.count_batch(Report(1, 0.1, 1))
    assert json.dumps(snapshot) == before


COUNTED = st.lists(
    st.tuples(
        st.integers(0, 40), st.sampled_from([200, 200, 429, 500]), st.integers(1, 9), st.floats(0.0, 1.0), st.booleans()
    ),
    max_size=60,
)


@given(one=COUNTED, other=COUNTED)
def test_two_replicas_add_up_to_one_that_had_done_it_all(one: list, other: list) -> None:
    def count(statistics: ModelStatistics, events: list) -> None:
        for version, status, rows, seconds, disagreed in events:
            statistics.count_request(version, status, seconds, seconds / 2, seconds / 4, rows)
            if version:
                statistics.count_batch(Report(rows, seconds, version))
                statistics.count_shadow(version, disagreed)
                if status == 500:
                    statistics.count_shadow_failure(version)

    def totals(snapshot) -> dict:
        every = [snapshot["older"], *snapshot["versions"].values()]
        return {
            "rows": sum(each["inference_count"] for each in every),
            "batches": sum(each["execution_count"] for each in every),
            "success_ns": sum(each["inference_stats"]["success"]["ns"] for each in every),
            "failed": sum(each["inference_stats"]["fail"]["count"] for each in every),
            "disagreed": sum(each["disagreed"] for each in every),
            "shadow_failed": sum(each["shadow_failed"] for each in every),
            "refused": snapshot["refused"],
            "batch_rows": snapshot["batch_rows"],
            "queue": snapshot["queue_s"]["counts"],
            "pending": snapshot["pending"],
        }

    first, second, both = (ModelStatistics("m", pending=lambda n=n: n) for n in (1, 2, 3))
    count(first, one)
    count(second, other)
    count(both, one + other)
    merged = merge_snapshots([first.snapshot(), second.snapshot()])
    assert totals(merged) == totals(both.snapshot())
    assert merge_snapshots([both.snapshot()]) == both.snapshot()


@given(st.lists(st.floats(0.0, 30.0), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_is_within_its_bounds_of_the_true_one(values: list[float], q: float) -> None:
    histogram = Histogram(SECONDS)
    for value in values:
        histogram.observe(value)
    true = sorted(values)[math.ceil(q * len(values)) - 1]
    found = estimate_quantile(histogram.snapshot(), q)
    assert found is not None
    above = next((bound for bound in SECONDS if true <= bound), SECONDS[-1])
    below = max((bound for bound in SECONDS if bound < true), default=0.0)
    assert min(below, SECONDS[-1]) <= found <= above


def test_a_quantile_of_what_came_since() -> None:
    histogram = Histogram(ROWS)
    assert estimate_quantile(histogram.snapshot(), 0.5) is None
    histogram.observe(1024)
    earlier = histogram.snapshot()
    for _ in range(4):
        histogram.observe(2)
    later = histogram.snapshot()
    assert estimate_quantile(subtract_histogram(earlier, later), 0.5) == 1.5
    assert subtract_histogram(earlier, later)["sum"] == 8
    assert estimate_quantile(subtract_histogram(later, earlier), 0.5) is None  # who counted has left
    histogram.observe(1e9)
    assert estimate_quantile(subtract_histogram(later, histogram.snapshot()), 0.5) == 1024


def test_a_replica_that_goes_takes_its_counts_along_and_no_rate_falls_below_none() -> None:
    both, one = ModelStatistics("m"), ModelStatistics("m")
    for counted, times in ((both, 10), (one, 4)):
        for _ in range(times):
            counted.count_request(3, 200, 0.01)
    assert build_version_status(3, "stable", 100.0, both.snapshot(), one.snapshot(), 2.0).requests_per_s == 3.0
    assert build_version_status(3, "stable", 100.0, one.snapshot(), both.snapshot(), 2.0).requests_per_s == 0.0
