"""What a rank measures: its shares of time, and metrics that are merged over ranks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from shoal.parallel import World
from shoal.train.loop.step_reports import ThroughputMeter
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
