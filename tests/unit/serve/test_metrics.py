"""What a model's statistics count, and that replicas' counts add up."""

import math
import pickle
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from shoal.open_inference.messages import BatchStatistics, Duration, InferenceStatistics
from shoal.serve.controller.status import build_version_status
from shoal.serve.messages.counts import ROWS, SECONDS, Histogram, LibraryMetric, ModelCounts, merge
from shoal.serve.messages.inference import Caller
from shoal.serve.messages.replica_report import ModelReport, ReplicaReport, Residency
from shoal.serve.protocol.prometheus import CONTENT_TYPE, METRICS, render, series
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


# -- what a scrape of an endpoint says, read as Prometheus reads it

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Batch:
    rows: int
    computed_s: float
    version: int


def scrape(*reports: ReplicaReport) -> Series:
    text = render(reports).decode()
    families = list(text_string_to_metric_families(text))
    series: Series = {}
    for family in families:
        for sample in family.samples:
            stem = sample.name.removesuffix("_total")  # the parser adds it to counters that have none, as Triton's
            key = (stem if stem in METRICS else sample.name, frozenset(sample.labels.items()))
            assert key not in series, key
            series[key] = sample.value
    assert {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")} <= set(METRICS)
    return series


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, frozenset(labels.items())]


def sum_of(series: Series, name: str) -> float:
    return sum(found for (each, _), found in series.items() if each == name)


def worked(live: bool = False) -> ModelStatistics:
    statistics = ModelStatistics("m", live=live, pending=lambda: 6)
    statistics.set_serving(1, candidate=2, percent=5.0)
    statistics.count_request(1, 200, 0.010, queued_s=0.004, computed_s=0.002, rows=3)
    statistics.count_request(1, 200, 0.020, queued_s=0.001, computed_s=0.002, rows=1)
    statistics.count_request(2, 500, 0.001)
    for status in (429, 429, 422, 499, 504):
        statistics.count_request(0, status, 0.001)
    statistics.count_batch(Batch(4, 0.002, 1))
    statistics.count_shadow(2, disagreed=True)
    statistics.count_shadow_failure(2)
    for count in (2, 3):
        statistics.count_columns(1, {'a "b"': {"gap": count}})
    return statistics


def report(statistics: ModelStatistics, replica: str = "a") -> ReplicaReport:
    residency = Residency({1: 10}, 20, 0.5, 1.5, loads=3, evictions=2, waiting=4, forwarded=5, waited=6)
    models = {"m": ModelReport(counts=statistics.snapshot(), queued_rows=7, residency=residency)}
    callers = {"ada": {"admitted": 3}, "": {"unknown": 2}}
    tokens = {"ada": {"input": 7, "output": 5}}
    statuses = {"200": 4, "401": 2}
    return ReplicaReport(replica, 0, 0, True, models, callers, statuses, certificate_expires_at=1e9, tokens=tokens)


def test_a_scrape_is_as_recorded() -> None:
    """Names, labels and values, whatever their order: `recorded/scrape.txt`."""
    lines = render([report(worked())]).decode().splitlines()
    assert sorted(lines) == sorted((Path(__file__).parent / "recorded" / "scrape.txt").read_text().splitlines())


def test_every_metric_has_a_series_and_none_is_unnamed() -> None:
    names = {name.removesuffix("_bucket") for name, _ in scrape(report(worked()))}
    assert set(METRICS) <= names
    for name, labels, _ in series(report(worked())):
        assert set(labels) <= set(METRICS[name].labels), name


def test_a_scrape_sees_every_replica() -> None:
    series = scrape(report(worked(), "a"), report(worked(), "b"), ReplicaReport("c"))
    assert sum_of(series, "nv_inference_count") == 8
    assert value(series, "shoal_replica_ready", replica="c") == 0


def test_a_live_model_has_one_series_that_only_goes_up() -> None:
    statistics = ModelStatistics("m", live=True)
    for version in range(1, 2 * MAX_VERSIONS):
        statistics.count_request(version, 200, 0.001, rows=1)
        series = scrape(report(statistics))
        assert value(series, "nv_inference_count", model="m", version="live", replica="a") == version


def test_no_request_is_in_two_series_when_versions_leave() -> None:
    statistics = ModelStatistics("m")
    counted = dict[str, float]()
    increase = 0.0
    for version in range(1, 2 * MAX_VERSIONS):
        statistics.count_request(version, 200, 0.001, rows=1)
        counted, before = {}, counted
        for name, labels, value in series(report(statistics)):
            if name == "nv_inference_count":
                counted[labels["version"]] = value
        increase += sum(value - before.get(each, 0) for each, value in counted.items())
        assert increase == version
    assert len(counted) == MAX_VERSIONS
    assert statistics.snapshot().sum_versions().rows == 2 * MAX_VERSIONS - 1


def test_a_key_for_some_models_sees_nothing_of_the_others_nor_of_other_callers() -> None:
    [model] = report(worked()).models.values()
    callers = {"ada": {"admitted": 1}, "bob": {"admitted": 2}}
    everything = replace(report(worked()), models={"mine": model, "other": model}, callers=callers)
    for caller, models, keys in [
        (Caller("ada", models=frozenset({"mine"})), {"mine"}, {"ada"}),
        (Caller("ada"), {"mine", "other"}, {"ada", "bob"}),
    ]:
        seen = [
            sample.labels
            for family in text_string_to_metric_families(render([everything], caller).decode())
            for sample in family.samples
        ]
        assert {labels["model"] for labels in seen if "model" in labels} == models
        assert {labels["key"] for labels in seen if "key" in labels} == keys
        is_all = caller.models is None
        assert any(not {"key", "model"} & labels.keys() for labels in seen) == is_all  # what is of the whole endpoint


def test_no_replica_no_series() -> None:
    assert render([]) == b"\n"
    assert b"version=0.0.4" in CONTENT_TYPE
