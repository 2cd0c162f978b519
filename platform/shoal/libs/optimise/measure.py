"""What a model gives and costs as an endpoint computes it: its metrics, latency, size and FLOPs. On the CPU.

Called by `search`, after a model's last step: earlier measurements say nothing about what a later step ruins.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.batch_tree import count_samples, slice_samples
from shoal.extend.cost import count_ops
from shoal.extend.data import Data, make_loader
from shoal.extend.parallel import Mean, ParallelSpec, SingleProcessModel, World
from shoal.extend.registry import Signature
from shoal.extend.serve import Forward, ModelOptions, TemplateConfig, open_template
from shoal.extend.train import MetricSet, Task, evaluate
from shoal.libs.optimise.choice import RowTotals
from shoal.libs.optimise.steps import Model
from shoal.weights import WeightSnapshot

Arrays = dict[str, np.ndarray]
NUM_ROUNDS, MIN_ROUNDS = 25, 5
SLICE_S = 0.01  # of one model, before the next one has its share of a round
BUDGET_S = 4.0  # of one model and size


def open_forward(model: Model, signature: Signature) -> Forward:
    """The forward of an endpoint, with one thread. Raises ConfigError, WeightsError."""
    has_hooks = (False, True)  # the outputs are the network's own, whatever a hook makes of them
    template = open_template(TemplateConfig(model.factory, signature, ModelOptions(device="cpu"), "cpu", 1, *has_hooks))
    return template.load(WeightSnapshot.from_payload(1, model.payload))


class ServedNetwork(nn.Module):
    """An endpoint's forward in the place of a network, for the evaluation of a Task.

    example: outputs of the network, whose form these have
    """

    def __init__(self, forward: Forward, signature: Signature, example: Any) -> None:
        super().__init__()
        self._compute = forward
        self._signature = signature
        self._example = example

    def forward(self, *inputs: Tensor) -> Any:
        found = self._compute(name_inputs(inputs, self._signature))
        tensors = [torch.from_numpy(np.asarray(each)) for each in found.values()]  # in order: a graph may rename them
        if isinstance(self._example, Mapping):
            return dict(zip(self._example, tensors, strict=True))
        return tuple(tensors) if isinstance(self._example, tuple | list) else tensors[0]


def name_inputs(inputs: Sequence[Tensor], signature: Signature) -> Arrays:
    """A network's arguments as arrays, by the names of its signature."""
    return {spec.name: each.numpy() for spec, each in zip(signature.inputs, inputs, strict=True)}


class RowMetric(MetricSet):
    """The stateful metrics, and one metric of each row, by the Task's own function of that row."""

    def __init__(self, task: Task, metric: str, world: World) -> None:
        super().__init__(task.stateful_metrics(), task.update_metric, world, counts=True)
        self._task, self._metric = task, metric
        self._found: list[tuple[float, float]] | None = []

    def observe(self, outputs: Any, batch: Any) -> None:
        super().observe(outputs, batch)
        try:
            for row in range(count_samples(batch)):
                part = slice(row, row + 1)
                if self._found is not None:
                    self._found.append(self._measure(slice_samples(outputs, part), slice_samples(batch, part)))
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            self._found = None  # a metric, or a batch, that is not made of rows

    def _measure(self, outputs: Any, batch: Any) -> tuple[float, float]:
        task = self._task
        found = task.loss(outputs, batch) if self._metric == "loss" else task.metrics(outputs, batch)[self._metric]
        return (float(found.total), float(found.count)) if isinstance(found, Mean) else (float(found), 1.0)

    def get_rows(self, value: float) -> RowTotals | None:
        """The rows, if the metric over all of them is `value`: otherwise it is no mean over rows."""
        totals, counts = np.array(self._found or [], float).reshape(-1, 2).T
        is_mean = counts.sum() > 0 and math.isclose(totals.sum() / counts.sum(), value, rel_tol=1e-3, abs_tol=1e-6)
        return RowTotals(totals, counts) if is_mean else None


def score_network(
    network: nn.Module, task: Task, data: Data, batch_size: int, metric: str
) -> tuple[dict[str, float], RowTotals | None]:
    """The Task's loss and metrics over its validation data; and one of them by row, None if it is no mean of rows."""
    assert data.validation is not None
    world, spec = World.single("cpu"), ParallelSpec()
    stateful = RowMetric(task, metric, world)
    with make_loader(data, "validation", batch_size=batch_size) as loader:
        found = evaluate(SingleProcessModel(network, task, spec, world, 0), loader, stateful)
    return found, stateful.get_rows(found[metric])


def measure_latencies(forwards: Sequence[Forward], inputs: Arrays) -> list[float]:
    """The median seconds of each forward, on one thread: in rounds, so that all meet the same moments of a machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        estimates = [max(_time_calls(forward, inputs, 1) for _ in range(2)) for forward in forwards]
        calls = [max(1, round(SLICE_S / max(each, 1e-9))) for each in estimates]
        slowest_s = max(number * each for number, each in zip(calls, estimates, strict=True))
        rounds = max(MIN_ROUNDS, min(NUM_ROUNDS, round(BUDGET_S / slowest_s)))
        times: list[list[float]] = [[] for _ in forwards]
        for _ in range(rounds):
            for index, forward in enumerate(forwards):
                times[index].append(_time_calls(forward, inputs, calls[index]) / calls[index])
    finally:
        torch.set_num_threads(threads)
    return [statistics.median(each) for each in times]


def _time_calls(forward: Callable[[Arrays], Any], inputs: Arrays, calls: int) -> float:
    began_s = time.perf_counter()
    for _ in range(calls):
        forward(inputs)
    return time.perf_counter() - began_s


def count_network_flops(network: nn.Module, inputs: Sequence[Tensor]) -> float | None:
    """The FLOPs of a forward; None where some operator's are unknown."""
    with torch.no_grad(), count_ops() as counts:
        network(*inputs)
    return None if counts.unknown else counts.flops_forward
