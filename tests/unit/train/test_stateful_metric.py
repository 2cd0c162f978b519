"""The metrics that are merged over ranks: they count on the CPU, whatever device a rank has."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.parallel import World
from shoal.train.stateful_metric import MetricSet


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
