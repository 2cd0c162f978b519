"""What a scrape of an endpoint says, read as Prometheus reads it."""

from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from shoal.serve.messages.inference import Caller
from shoal.serve.messages.replica_report import ModelReport, ReplicaReport, Residency
from shoal.serve.protocol.prometheus import CONTENT_TYPE, METRICS, render, series
from shoal.serve.replica.model_statistics import MAX_VERSIONS, ModelStatistics

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
