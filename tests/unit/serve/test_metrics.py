"""What a model's statistics count, and that replicas' counts add up."""

import math
import pickle
import threading
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from shoal.open_inference.messages import BatchStatistics, Duration, InferenceStatistics
from shoal.serve.controller.status import build_version_status
from shoal.serve.messages.counts import ROWS, SECONDS, Histogram, LibraryMetric, ModelCounts, merge
from shoal.serve.replica.model_statistics import MAX_VERSIONS, ModelStatistics


@dataclass
class Report:
    """The part of a Batch that is counted."""

    rows: int
    computed_s: float
    version: int


def test_a_request_and_a_batch_are_counted_under_their_version() -> None:
    statistics = ModelStatistics("m")
    statistics.count_request(3, 200, 0.010, queued_s=0.002, computed_s=0.005, rows=4)
    statistics.count_request(3, 200, 0.020, queued_s=0.001, computed_s=0.004, rows=1)
    statistics.count_request(3, 500, 0.030)
    statistics.count_request(4, 200, 0.001, rows=1)
    for rows, computed_s in [(4, 0.5), (1, 0.25), (4, 0.5)]:
        statistics.count_batch(Report(rows, computed_s, 3))
    for status in (429, 422, 429):  # these reached no version
        statistics.count_request(0, status, 0.001)
    third, fourth, nothing = statistics.list_statistics([3, 4, 5])
    assert (third.inference_count, third.execution_count, fourth.inference_count) == (5, 3, 1)
    assert third.inference_stats == InferenceStatistics(
        success=Duration(2, 30_000_000),
        fail=Duration(1, 30_000_000),
        queue=Duration(2, 3_000_000),
        compute_infer=Duration(2, 9_000_000),
    )
    sizes = {1: Duration(1, 250_000_000), 4: Duration(2, 1_000_000_000)}
    assert third.batch_stats == [BatchStatistics(rows, compute_infer=each) for rows, each in sizes.items()]
    assert third.last_inference > 1_600_000_000_000 > nothing.last_inference == 0
    counts = statistics.snapshot()
    assert (counts.versions[3].statuses, counts.refused) == ({200: 2, 500: 1}, {429: 2, 422: 1})
    assert (sum(counts.versions[3].request_s.counts), sum(counts.queue_s.counts), counts.batch_rows.sum) == (2, 3, 9)


def test_what_serves_and_what_waits() -> None:
    statistics = ModelStatistics("m", pending=lambda: 5)
    statistics.set_serving(1)
    statistics.set_serving(1, candidate=2, percent=10.0)
    statistics.set_serving(2)
    statistics.count_shadow(3, disagreed=False)
    statistics.count_shadow(3, disagreed=True)
    counts = statistics.snapshot()
    assert (counts.serving, counts.percent) == ({"stable": 2, "candidate": 0}, 0.0)
    assert (counts.swaps, counts.pending) == (2, 5)
    assert (counts.versions[3].compared, counts.versions[3].disagreed) == (2, 1)
    statistics.count_shadow_failure(3)
    counts = statistics.snapshot()
    assert (counts.versions[3].requests, counts.versions[3].errors) == (3, 1)


def test_however_many_versions_come_the_newest_are_kept_apart_and_nothing_is_lost() -> None:
    statistics = ModelStatistics("m", live=True)
    num_versions = 3 * MAX_VERSIONS
    for version in range(1, num_versions + 1):
        statistics.count_request(1, 200, 0.001, rows=1)  # the first stays in use
        statistics.count_request(version, 200, 0.001, rows=2)
        statistics.count_batch(Report(2, 0.001, version))
        statistics.count_shadow(version, disagreed=True)
    counts = statistics.snapshot()
    assert len(counts.versions) == MAX_VERSIONS
    assert {1, num_versions} <= counts.versions.keys()
    assert counts.versions[1].rows == num_versions + 2  # in use all the time, it never left
    every = counts.sum_versions()
    assert (every.rows, every.batches, every.disagreed) == (3 * num_versions, num_versions, num_versions)
    assert (sum(every.request_s.counts), every.sizes[2][0]) == (2 * num_versions, num_versions)


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
    version = statistics.snapshot().versions[1]
    assert version.batches == 4 * num_batches == version.sizes[1][0]


def test_a_snapshot_crosses_processes_and_stays_as_it_was() -> None:
    statistics = ModelStatistics("m")
    statistics.count_request(1, 200, 0.001, rows=1)
    snapshot = statistics.snapshot()
    before = pickle.dumps(snapshot)
    assert pickle.loads(before) == snapshot
    statistics.count_request(1, 200, 0.001, rows=1)
    statistics.count_batch(Report(1, 0.1, 1))
    assert pickle.loads(before) == snapshot != statistics.snapshot()


QUARTERS = st.integers(0, 64).map(lambda number: number / 4)  # whose sums are exact
COUNTED = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([200, 200, 429, 500]), st.integers(1, 9), QUARTERS, st.booleans()),
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

    def sum_up(counts: ModelCounts) -> ModelCounts:
        every = counts.sum_versions()
        every.last_ms = every.used = 0
        return replace(counts, versions={}, older=every)

    first, second, both = (ModelStatistics("m", pending=lambda n=n: n) for n in (1, 2, 3))
    count(first, one)
    count(second, other)
    count(both, one + other)
    assert sum_up(merge([first.snapshot(), second.snapshot()])) == sum_up(both.snapshot())
    assert merge([both.snapshot()]) == both.snapshot()


def test_what_a_library_counts_is_copied_and_adds_up() -> None:
    histogram = Histogram(ROWS)
    live = {"words": LibraryMetric("counter", "Words", 2.0), "rows": LibraryMetric("histogram", "Rows", histogram)}
    copied = merge([live])
    assert copied == live
    histogram.observe(2)
    assert copied != live
    assert merge([live, live])["words"] == LibraryMetric("counter", "Words", 4.0)


@given(st.lists(st.floats(0.0, 30.0), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_is_within_its_bounds_of_the_true_one(values: list[float], q: float) -> None:
    histogram = Histogram(SECONDS)
    for value in values:
        histogram.observe(value)
    true = sorted(values)[math.ceil(q * len(values)) - 1]
    found = histogram.estimate_quantile(q)
    assert found is not None
    above = next((bound for bound in SECONDS if true <= bound), SECONDS[-1])
    below = max((bound for bound in SECONDS if bound < true), default=0.0)
    assert min(below, SECONDS[-1]) <= found <= above


def test_a_quantile_of_what_came_since() -> None:
    histogram = Histogram(ROWS)
    assert histogram.estimate_quantile(0.5) is None
    histogram.observe(1024)
    earlier = merge([histogram])
    for _ in range(4):
        histogram.observe(2)
    later = merge([histogram])
    recent = later.since(earlier)
    assert (recent.estimate_quantile(0.5), recent.sum) == (1.5, 8)
    assert earlier.since(later).estimate_quantile(0.5) is None  # who counted has left
    histogram.observe(1e9)
    assert histogram.since(later).estimate_quantile(0.5) == 1024


def test_a_replica_that_goes_takes_its_counts_along_and_no_rate_falls_below_none() -> None:
    both, one = ModelStatistics("m"), ModelStatistics("m")
    for counted, times in ((both, 10), (one, 4)):
        for _ in range(times):
            counted.count_request(3, 200, 0.01)
    assert build_version_status(3, "stable", 100.0, both.snapshot(), one.snapshot(), 2.0).requests_per_s == 3.0
    assert build_version_status(3, "stable", 100.0, one.snapshot(), both.snapshot(), 2.0).requests_per_s == 0.0
