"""What Ray's exporter is told of a replica, and of a run: its metric classes are replaced; there is no cluster."""

import math
import os
from pathlib import Path
from typing import Any

import pytest

import shoal.runs
from shoal.runs import RunKind
from shoal.runs.record import recorder as recorder_module
from shoal.runs.record.opening import create, reopen
from shoal.runs.run_status import Status
from shoal.serve.messages.counts import LibraryMetric
from shoal.serve.protocol.prometheus import METRICS
from unit.serve.test_metrics import report, worked

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class FakeMetric:
    """Adds or sets, and refuses as Ray's do what does not fit."""

    values: Values

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert description
        self.name, self.tag_keys = name, tag_keys

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0
        key = self._key(tags)
        self.values[key] = self.values.get(key, 0.0) + value

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values[self._key(tags)] = value

    def _key(self, tags: dict[str, str]) -> Any:
        assert set(tags) == set(self.tag_keys)
        return self.name, tuple(sorted(tags.items()))


def test_counters_grow_by_what_is_new_and_gauges_are_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.serve.on_ray import replica_worker as ray_metrics

    FakeMetric.values = values = {}
    monkeypatch.setattr(ray_metrics, "Counter", FakeMetric)
    monkeypatch.setattr(ray_metrics, "Gauge", FakeMetric)
    statistics, metrics = worked(), ray_metrics.RayMetrics()

    def value(name: str, **labels: str) -> float:
        return values[name, tuple(sorted({**labels, "replica": "a"}.items()))]

    for _ in range(2):
        metrics.publish(report(statistics))
        assert value("nv_inference_count", model="m", version="1") == 4
        assert value("shoal_requests_total", model="m", version="", status="429") == 2
        assert value("shoal_queued_rows", model="m") == 7
    counted = report(statistics)
    snapshot = counted.models["m"].counts
    assert snapshot is not None
    snapshot.others = {"shoal_words_total": LibraryMetric("counter", "Words, of a library", 5.0)}
    metrics.publish(counted)
    assert value("shoal_words_total", model="m") == 5
    statistics.count_request(1, 200, 0.01, rows=3)
    metrics.publish(report(statistics))
    assert value("nv_inference_count", model="m", version="1") == 7
    own = {name for name, metric in METRICS.items() if metric.kind != "histogram"}
    assert {name for name, _ in values} == own | {"shoal_words_total"}


def test_columns_with_umlauts_are_ascii_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.serve.on_ray import replica_worker

    FakeMetric.values = values = {}
    monkeypatch.setattr(replica_worker, "Counter", FakeMetric)
    monkeypatch.setattr(replica_worker, "Gauge", FakeMetric)
    replica_worker.RayMetrics().publish(report(worked(), replica="Größe"))
    assert {dict(tags)["replica"] for _, tags in values} == {r"Gr\xf6\xdfe"}


def test_rays_own_classes_take_every_metric() -> None:
    from shoal.serve.on_ray.replica_worker import RayMetrics

    RayMetrics()


class FakeGauge:
    """ray.util.metrics.Gauge, which needs no cluster."""

    values: dict[tuple[str, str, str], float]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert description
        self._name, self._tags = name, set(tag_keys)

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == self._tags
        self.values[self._name, tags["run"], tags.get("member", "")] = value


class FakeCounter(FakeGauge):
    """ray.util.metrics.Counter of events."""

    counts: dict[str, float]

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == self._tags == {"run", "kind"}
        self.counts[tags["kind"]] = self.counts.get(tags["kind"], 0.0) + value


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str, str], float]:
    from shoal.runs import ray_gauges

    FakeGauge.values, FakeCounter.counts = {}, {}
    monkeypatch.setattr(ray_gauges, "Gauge", FakeGauge)
    monkeypatch.setattr(ray_gauges, "Counter", FakeCounter)
    return FakeGauge.values


@pytest.mark.parametrize(
    ("kind", "metric", "expected"),
    [
        (RunKind.TRAINING, "train/loss", ("shoal_training_train_loss", "")),
        (RunKind.LOOP, "steps/per_s", ("shoal_loop_steps_per_s", "")),
        (RunKind.LOOP, "actor_lag/actor-3", ("shoal_loop_actor_lag", "actor-3")),
        (RunKind.LOOP, "rejected/actor-3 stale", ("shoal_loop_rejected", "actor-3 stale")),
        (RunKind.SWEEP, "trial-012/validation/loss", ("shoal_sweep_validation_loss", "trial-012")),
        (RunKind.OTHER, "Loss (mean)", ("shoal_other_loss_mean", "")),
    ],
)
def test_a_gauge_has_the_metrics_name_and_its_member(kind: RunKind, metric: str, expected: tuple[str, str]) -> None:
    from shoal.runs.ray_gauges import name_gauge

    assert name_gauge(kind, metric) == expected


def test_the_newest_value_counts_also_one_that_is_not_finite(values: dict[Any, float]) -> None:
    from shoal.runs.ray_gauges import RunGauges

    gauges = RunGauges("r", RunKind.TRAINING)
    gauges.publish([(1, 0.0, {"loss": 2.0, "accuracy": 0.5}), (2, 0.0, {"loss": math.nan, "accuracy": 0.6})])
    assert values["shoal_training_accuracy", "r", ""] == 0.6
    assert math.isnan(values["shoal_training_loss", "r", ""])  # of which Ray keeps no series
    assert FakeCounter.counts == {"not_finite loss": 1.0}


def test_values_are_set_again_while_the_run_lives_and_not_once_it_has_ended(
    values: dict[Any, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(recorder_module, "HEARTBEAT_INTERVAL_S", 0.0)
    with create("train", "task: t\n", "r") as recorder:
        recorder.log(1, {"loss": 3.0})
        recorder.log_group(1, "actor_lag", {"a": 4.0, "b": 5.0})
        recorder.flush()
        recorder.log_group(2, "actor_lag", {"b": 6.0})
        recorder.flush()
        values.clear()
        recorder.flush()  # with nothing new
        assert values == {("shoal_training_loss", "r", ""): 3.0, ("shoal_training_actor_lag", "r", "b"): 6.0}
        recorder.finish(Status.FAILED, "the loss is not finite")
    values.clear()
    recorder._flush(heartbeat_after_s=0.0)
    assert values == {}


def test_what_a_run_has_met_is_counted_and_its_newest_checkpoint_has_its_time(
    values: dict[Any, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with create("train", "task: t\n", "r") as recorder:
        for _ in range(2):
            recorder.record_event("checkpoint_failed", step=3, error="the disk is full")
        for step, at in [(3, 1000.0), (6, 2000.0)]:
            folder = recorder.folder / "checkpoints" / f"step-{step:09}"
            folder.mkdir(parents=True)
            os.utime(folder, (at, at))
        recorder.finish(Status.FAILED, "the disk is full")
    assert FakeCounter.counts == {"checkpoint_failed": 2.0, "failed": 1.0}
    assert values["shoal_run_checkpoint_timestamp_seconds", "r", ""] == 2000.0


def test_a_run_with_very_many_metrics_exports_some(values: dict[Any, float], caplog: pytest.LogCaptureFixture) -> None:
    from shoal.runs.ray_gauges import MAX_GAUGES, RunGauges

    gauges = RunGauges("r", RunKind.OTHER)
    for step in range(2):
        gauges.publish([(step, 0.0, {f"m{number}": step for number in range(MAX_GAUGES + 10)})])
    assert len(values) == MAX_GAUGES
    assert set(values.values()) == {1}
    assert len(caplog.records) == 1


def test_a_recorder_on_a_cluster_sets_them_and_one_without_does_not(
    values: dict[Any, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with create("train", "task: t\n", "r") as recorder:
        recorder.log(1, {"loss": 3.0})
        recorder.flush()
        assert values == {}
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        recorder.log(2, {"loss": 2.0}, in_history=False)
        recorder.log_group(2, "actor_lag", {"a": 4.0})
        recorder.flush()
    with reopen("r") as recorder:
        recorder.log(3, {"loss": 1.0})
    expected = {("shoal_training_loss", "r", ""): 1.0, ("shoal_training_actor_lag", "r", "a"): 4.0}
    assert values == expected
    assert shoal.runs.load("r").kind is RunKind.TRAINING
