"""What a rank measures: its shares of time, metrics that are merged over ranks, time and cost to an accuracy."""

import math
from typing import Any, NamedTuple

import pandas
import pytest
import torch
from torch import Tensor

import shoal.runs
from shoal.parallel import World
from shoal.train.loop.step_reports import ThroughputMeter
from shoal.train.reporting.time_to_accuracy import (
    TRAINING_S,
    Attempt,
    TargetReached,
    compute_cost,
    find_attempts,
    find_target_reached,
    get_evaluations,
)
from shoal.train.spec import TargetSpec
from shoal.train.stateful_metric import MetricSet


def test_what_nobody_can_tell_is_not_reported() -> None:
    """A plan whose waits are the device's says NaN seconds of waiting; that is not all of the time."""
    meter = ThroughputMeter(math.nan, communicated_s=lambda: math.nan)
    meter.count_steps(1, 32)
    found = meter.compute_rates(waited_s=0.0)
    assert "wait/communication" not in found
    assert found["wait/data"] == 0.0


def test_a_share_is_at_most_all_of_the_time() -> None:
    meter = ThroughputMeter(math.nan, communicated_s=lambda: 1e6)
    meter.count_steps(1, 32)
    found = meter.compute_rates(waited_s=1e6)  # a wait that began before the last report
    assert (found["wait/data"], found["wait/communication"]) == (1.0, 1.0)


def test_waits_of_an_evaluation_are_none_of_the_steps() -> None:
    waited = [0.0]
    meter = ThroughputMeter(math.nan, communicated_s=lambda: waited[0])
    meter.count_steps(1, 32)
    with meter.pause():
        waited[0] += 1e6
    assert meter.compute_rates(waited_s=0.0)["wait/communication"] == 0.0


def test_a_step_of_replicas_without_waiting_is_one_of_the_run() -> None:
    meter = ThroughputMeter(math.nan, communicated_s=lambda: math.nan)
    meter.count_steps(4, 4 * 32)
    found = meter.compute_rates(waited_s=0.0)
    assert found["samples/per_s"] * found["step/seconds"] == pytest.approx(32)


class OnDevice(Tensor):
    """As a tensor of a GPU: `cpu` copies it."""

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()


class Outputs(NamedTuple):
    logits: Tensor


class Sum:
    total = 0.0

    def update(self, *values: Any) -> None:
        assert all(type(each) is Tensor for each in values)
        self.total += float(sum(each.sum() for each in values))

    def merge_state(self, incoming_state: Any) -> None: ...

    def compute(self) -> float:
        return self.total

    def reset(self) -> None:
        self.total = 0.0


def update(name: str, metric: Any, outputs: Outputs, batch: Any) -> None:
    metric.update(outputs.logits, batch[-1])


def test_a_metric_gets_the_outputs_of_a_gpu_on_the_cpu() -> None:
    metrics = MetricSet({"sum": Sum()}, update, World(0, 1, torch.device("cuda", 0)), counts=True)
    metrics.observe(Outputs(torch.ones(3).as_subclass(OnDevice)), (None, torch.ones(2).as_subclass(OnDevice)))
    assert metrics.compute() == {"sum": 5.0}


ROWS = [(10, 5.0, 0.5), (20, 10.0, 0.92), (30, 15.0, 0.88), (40, 20.0, 0.95)]


def test_money_is_time_times_devices_times_price() -> None:
    assert compute_cost(1800.0, [Attempt(0.0, 4)], 2.5) == pytest.approx(5.0)


def test_each_life_is_paid_for_with_its_own_workers() -> None:
    lives = [Attempt(0.0, 4), Attempt(1800.0, 1)]
    assert compute_cost(900.0, lives, 2.0) == pytest.approx(2.0)
    assert compute_cost(3600.0, lives, 2.0) == pytest.approx(4.0 + 1.0)
    # The third went on from a checkpoint of the first: what the second did is done again, and is not in the seconds.
    again = [Attempt(0.0, 4), Attempt(1800.0, 8), Attempt(900.0, 1)]
    assert compute_cost(1800.0, again, 2.0) == pytest.approx(2.0 + 0.5)


def test_the_lives_of_a_record() -> None:
    with shoal.runs.create("train", "{}", "lives") as recorder:
        recorder.record_event("training", step=0, workers=2, training_s=0.0)
        recorder.record_event("training", step=30, workers=1, training_s=12.5)
    assert find_attempts(shoal.runs.load("lives").events(), 3) == [Attempt(0.0, 2), Attempt(12.5, 1)]
    with shoal.runs.create("train", "{}", "older") as recorder:
        recorder.record_event("training", step=0, workers=2)
        recorder.record_event("training", step=30, workers=1, training_s=12.5)
    assert find_attempts(shoal.runs.load("older").events(), 3) == [Attempt(0.0, 3)]


def test_the_first_evaluation_that_meets_the_target_counts() -> None:
    target = TargetSpec(metric="accuracy", value=0.9)
    assert find_target_reached(ROWS, target, [Attempt(0.0, 2)], 3600.0) == TargetReached(20, 0.92, 10.0, 20.0)
    assert find_target_reached(ROWS, TargetSpec(metric="accuracy", value=0.99)) is None
    falling = [(step, at, 1 - value) for step, at, value in ROWS]
    least = find_target_reached(falling, TargetSpec(metric="loss", value=0.1))
    assert least.step == 20


def test_rows_of_a_record_without_the_time_of_evaluation() -> None:
    with shoal.runs.create("train", "{}", "one") as recorder:
        recorder.log(5, {TRAINING_S: 2.0, "train/loss": 1.0})
        recorder.log(10, {"validation/accuracy": 0.5})
        recorder.log(15, {TRAINING_S: 7.0})
        recorder.log(20, {TRAINING_S: 9.0, "validation/accuracy": 0.9})
        recorder.log(25, {"validation/accuracy": 0.95})
    metrics = shoal.runs.load("one").metrics()
    assert get_evaluations(metrics, "validation/accuracy") == [(10, 7.0, 0.5), (20, 9.0, 0.9)]
    assert get_evaluations(metrics, "validation/f1") == []
    assert get_evaluations(pandas.DataFrame({"validation/accuracy": [1.0]}), "validation/accuracy") == []
