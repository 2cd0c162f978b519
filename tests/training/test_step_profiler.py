"""Steps of a running Trainer are measured on a few of them; tables of their numbers travel and merge."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from shoal.cost import CostTable
from shoal.cost.cost_table import combine_ranks, format_quantity, relative_error
from shoal.cost.step_profiler import (
    MAX_MORE,
    MIN_TIMED_S,
    NUM_TIMED,
    NUM_WARM_UP,
    StepProfiler,
    TimedStep,
    compute_bubble,
    profile_step,
)
from shoal.data import Data
from shoal.data.loader import load_first_batch
from shoal.parallel import World
from shoal.parallel.build import parallelize
from shoal.parallel.model import ParallelModel
from shoal.train import Task, TrainSpec
from shoal.train.optim.ema import WeightAverage
from shoal.train.optim.optimizers import make_optimizer

WIDTH, BATCH = 32, 16
PARAMETERS = 3 * (WIDTH * WIDTH + WIDTH) + 4 * WIDTH + 4
FORWARD = 2 * (3 * WIDTH * WIDTH + 4 * WIDTH)


class Blocks(Task):
    """Four layers that can be replicated, sharded, split and cut."""

    def __init__(self, *, samples: int = 64) -> None:
        self.samples = samples

    def model(self) -> nn.Module:
        layers = [module for _ in range(3) for module in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 4))

    def data(self) -> Data:
        return Data(TensorDataset(torch.randn(self.samples, WIDTH), torch.randint(0, 4, (self.samples,))))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def pipeline_cuts(self) -> list[str]:
        return ["3"]


def probed(num_metered: int = 1) -> tuple[ParallelModel, Optimizer, Any, StepProfiler]:
    """The model of Blocks in one process, its optimiser, a batch, and a probe of its steps."""
    task = Blocks()
    spec = TrainSpec(batch_size=BATCH)
    world = World.single("cpu")
    batch = load_first_batch(task.data(), BATCH, world.device)
    model = parallelize(task.model(), task, spec.parallel, spec.resolve_dims(), world, batch)
    optimizer = make_optimizer(task, spec.optimizer, [parameter for _, parameter in model.named_parameters()])
    return model, optimizer, batch, StepProfiler(model, optimizer, world, num_metered)


def test_a_probe_measures_an_average_of_the_weights() -> None:
    model, optimizer, batch, _ = probed()
    averaged = WeightAverage(model, 0.9)
    with profile_step(model, optimizer, averaged.tensors) as found:
        model.train_step(batch, 0)
    assert found.values["memory_average"] == 4 * PARAMETERS
    with profile_step(model, optimizer) as without:
        model.train_step(batch, 1)
    assert found.values["memory_peak"] == without.values["memory_peak"] + 4 * PARAMETERS


def test_of_long_steps_a_few_are_timed() -> None:
    model, _, batch, probe = probed()
    for step in range(NUM_WARM_UP + NUM_TIMED + 1):
        assert not probe.is_due
        with probe.step():
            model.train_step(batch, step)
            time.sleep(1.1 * MIN_TIMED_S / NUM_TIMED if NUM_WARM_UP <= step < NUM_WARM_UP + NUM_TIMED else 0.0)
    assert probe.is_due
    assert probe.collect_table()["step_s"] >= 1.1 * MIN_TIMED_S / NUM_TIMED
    assert probe.is_done
    assert not probe.is_due


def test_of_short_steps_more_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cost.step_profiler.MIN_TIMED_S", 1e6)
    model, _, batch, probe = probed()
    due = []
    for step in range(NUM_WARM_UP + NUM_TIMED + 1 + MAX_MORE + 1):
        with probe.step():
            model.train_step(batch, step)
        if probe.is_due:
            due.append(step)
            probe.collect_table()
    assert due == [NUM_WARM_UP + NUM_TIMED, NUM_WARM_UP + NUM_TIMED + MAX_MORE]
    assert probe.is_done


def test_steps_that_are_not_alike_are_averaged() -> None:
    """Every other one has no backward pass: the FLOPs are those of a mean step, the memory that of the largest."""
    model, _, batch, probe = probed(num_metered=4)
    for step in range(NUM_WARM_UP + NUM_TIMED + 4):
        assert not probe.is_due
        with probe.step():
            if step % 2:
                model.train_step(batch, step)
            else:
                with torch.no_grad():
                    model.modules[0](*Blocks().inputs(batch))
    assert probe.is_due
    measured, step = probe.collect_table(), 3 * FORWARD - 2 * WIDTH * WIDTH  # nothing asks for the inputs' gradient
    assert measured["flops_step"] == pytest.approx(BATCH * (step + FORWARD) / 2)
    assert measured["memory_activations"] > 4 * BATCH * 3 * WIDTH  # of the largest step


def test_a_rank_that_leaves_the_schedule_early_waits_all_the_same() -> None:
    """Four micro-batches of 1 s forward and 2 s backward in two stages: the last rank is done 2 s before the first."""
    first, last = TimedStep(0, 16.0, 12.0, 15.0), TimedStep(0, 16.0, 12.0, 13.0)
    assert compute_bubble([first, last]) == pytest.approx(0.2)  # as 1F1B is simulated, too
    slower = TimedStep(1, 16.0, 24.0, 30.0)  # another pipeline, whose ranks wait for each other only
    assert compute_bubble([first, last, slower, slower]) == pytest.approx(0.2)


def test_tables_travel_and_merge() -> None:
    found = CostTable({"memory_peak": 3.0, "bubble": float("nan")}, unknown=("aten.x",), cuts=("3",))
    assert CostTable.from_details({**found.to_details(), "later": 1}) == CostTable(
        {"memory_peak": 3.0}, ("aten.x",), (), ("3",)
    )
    assert combine_ranks({0: {"flops_rank": 2.0}, 1: {"flops_rank": 3.0}}) == {"flops_step": 5.0, "flops_rank": 3.0}
    assert (relative_error(1.1, 1.0), relative_error(0.0, 0.0)) == (pytest.approx(0.1), 0.0)
    words = [
        format_quantity(3 << 20, "bytes"),
        format_quantity(2.5e9, "operations"),
        format_quantity(0.0021, "seconds"),
        format_quantity(0.25, "share"),
    ]
    assert words == ["3 MiB", "2.5 GFLOP", "2.1 ms", "25%"]
