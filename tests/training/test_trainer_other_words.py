"""A run that is resumed with other words than it began with: what they change, and what goes on as it was."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.parallel import World
from shoal.testing.run import MemoryLog
from shoal.train.loop.trainer import Trainer
from shoal.train.spec import TrainSpec
from train_task import Toy
from training.toy_run import spec_of, train_toy


class OwnOptimizer(Toy):
    """Its optimiser is its own affair; `decay` is what it is made with."""

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = decay

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01, weight_decay=self.decay)


def settings_after(folder: Path, spec: TrainSpec, task: Toy) -> dict[str, Any]:
    """The settings of the optimiser with which a run ended."""
    trainer = Trainer(spec, task, World.single("cpu"), folder)
    trainer.run()
    (group,) = trainer._parts.optimizer.param_groups
    return group


def rates_of(log: MemoryLog) -> dict[int, float]:
    return log.get_curve("train/learning_rate")


def evaluated(log: MemoryLog) -> list[int]:
    return list(log.get_curve("validation/loss"))


@pytest.mark.parametrize(("batch_size", "steps_per_epoch"), [(16, 16), (64, 4)])
def test_epochs_and_the_schedule_go_on_under_another_batch_size(
    tmp_path: Path, batch_size: int, steps_per_epoch: int
) -> None:
    epochs = {"stop": {"epochs": 4}, "schedule": {"name": "one_cycle"}}
    train_toy(tmp_path, **epochs, interrupt_after=16)  # two epochs of eight steps
    outcome = train_toy(tmp_path, batch_size=batch_size, **epochs)
    assert outcome.result.steps == 16 + 2 * steps_per_epoch
    assert outcome.log.metrics[17]["train/epoch"] == 2 + 1 / steps_per_epoch
    assert outcome.log.metrics[outcome.result.steps]["train/epoch"] == 4.0
    assert [step for step in evaluated(outcome.log) if step > 16] == [16 + steps_per_epoch, 16 + 2 * steps_per_epoch]
    rates = rates_of(outcome.log)
    whole = train_toy(tmp_path / "whole", batch_size=batch_size, **epochs).log
    later = {step - 2 * steps_per_epoch: rate for step, rate in rates_of(whole).items() if step > 2 * steps_per_epoch}
    assert {step - 16: rate for step, rate in rates.items() if step > 16} == later
    training = dict(outcome.log.events)["training"]
    assert training["total_steps"] == outcome.result.steps


def test_a_warm_up_that_is_over_does_not_begin_again_under_another_batch_size(tmp_path: Path) -> None:
    words = {"stop": {"epochs": 4}, "schedule": {"name": "linear", "warmup": 6}}
    train_toy(tmp_path, **words, interrupt_after=8)  # one epoch
    notes = train_toy(tmp_path, batch_size=64, **words).log
    rates = [rate for step, rate in sorted(rates_of(notes).items()) if step > 8]
    assert rates[0] == pytest.approx(0.01 * 24 / 26)  # as it would have been
    assert rates == sorted(rates, reverse=True)


def test_a_batch_size_that_changes_within_an_epoch_ends_with_the_epoch(tmp_path: Path) -> None:
    train_toy(tmp_path, stop={"epochs": 2}, interrupt_after=4)  # 128 of 256 samples
    outcome = train_toy(tmp_path, stop={"epochs": 2}, batch_size=50)
    assert [step for step in evaluated(outcome.log) if step > 4] == [6, 11]  # two batches are left, an epoch has five
    assert outcome.result.steps == 11
    assert outcome.log.metrics[6]["train/epoch"] == 1.0


def test_steps_are_counted_as_steps_whatever_their_batch_size(tmp_path: Path) -> None:
    steps = {"stop": {"steps": 20}, "schedule": {"name": "linear"}}
    train_toy(tmp_path, **steps, interrupt_after=10)
    outcome = train_toy(tmp_path, batch_size=64, **steps)
    assert outcome.result.steps == 20
    assert rates_of(outcome.log)[11] == pytest.approx(0.01 * 0.5)


def test_the_optimizers_words_hold_in_a_run_that_goes_on(tmp_path: Path) -> None:
    train_toy(tmp_path, stop={"steps": 6}, schedule={"name": "one_cycle", "total_steps": 12})
    words = {"learning_rate": 0.002, "weight_decay": 0.1, "betas": (0.8, 0.95)}
    settings = settings_after(tmp_path, spec_of(stop={"steps": 8}, optimizer=words), Toy())
    assert (settings["lr"], settings["weight_decay"], settings["betas"]) == (0.002, 0.1, (0.8, 0.95))


def test_momentum_does_not_stay_where_a_cycle_left_it(tmp_path: Path) -> None:
    sgd = {"name": "sgd", "learning_rate": 0.01, "momentum": 0.5}
    train_toy(tmp_path, stop={"steps": 6}, optimizer=sgd, schedule={"name": "one_cycle", "total_steps": 12})
    assert settings_after(tmp_path, spec_of(stop={"steps": 8}, optimizer=sgd), Toy())["momentum"] == 0.5


def test_an_optimizer_of_the_tasks_own_goes_on_with_its_settings(tmp_path: Path) -> None:
    settings_after(tmp_path, spec_of(stop={"steps": 2}, optimizer={}), OwnOptimizer(decay=0.3))
    settings = settings_after(tmp_path, spec_of(stop={"steps": 4}, optimizer={}), OwnOptimizer(0.0))
    assert settings["weight_decay"] == 0.3


def test_a_run_that_ends_where_it_was_interrupted_is_evaluated_there(tmp_path: Path) -> None:
    train_toy(tmp_path / "parts", stop={"steps": 20}, interrupt_after=11)
    outcome = train_toy(tmp_path / "parts", stop={"steps": 11})
    expected = train_toy(tmp_path / "whole", stop={"steps": 11})
    assert outcome.result.steps == outcome.result.selected_step == 11
    assert outcome.result.metrics == expected.result.metrics


def test_what_a_new_metric_finds_best_is_kept(tmp_path: Path) -> None:
    every = {"evaluate": {"every_steps": 4}}
    first = {"steps": 8, "convergence": {"metric": "loss", "direction": "max", "patience": 9}}
    assert train_toy(tmp_path, stop=first, **every).result.selected_step == 4  # the highest loss
    second = {"steps": 40, "convergence": {"metric": "accuracy", "patience": 9}}
    outcome = train_toy(tmp_path, stop=second, **every)
    accuracy = outcome.log.get_curve("validation/accuracy")
    assert (
        outcome.result.metrics["accuracy"]
        == accuracy[outcome.result.selected_step]
        == max(accuracy[step] for step in accuracy if step > 4)
    )


def test_the_network_where_a_run_goes_on_may_be_the_best_by_the_new_metric(tmp_path: Path) -> None:
    every = {"evaluate": {"every_steps": 4}, "optimizer": {"name": "sgd", "learning_rate": 1e-9, "momentum": 0.0}}
    train_toy(tmp_path, stop={"steps": 8, "convergence": {"metric": "loss"}}, **every)
    outcome = train_toy(tmp_path, stop={"convergence": {"metric": "accuracy", "patience": 2}}, **every)
    assert (outcome.result.steps, outcome.result.selected_step) == (16, 8)


def test_without_convergence_the_new_steps_are_kept(tmp_path: Path) -> None:
    watched = {"metric": "loss", "direction": "max", "patience": 9}
    train_toy(tmp_path, stop={"epochs": 2, "convergence": watched})
    outcome = train_toy(tmp_path, stop={"epochs": 3})
    assert (outcome.result.steps, outcome.result.selected_step) == (24, 24)


@pytest.mark.parametrize("tensor", [1, 2])
def test_selective_backprop_begins_anew_under_another_plan(tmp_path: Path, tensor: int) -> None:
    spec = spec_of(stop={"steps": 3}, selective_backprop={"beta": 1.0})
    train_toy(tmp_path, spec=spec)
    notes = MemoryLog()
    trainer = Trainer(spec, Toy(), World.single("cpu"), tmp_path, journal=notes)
    trainer._parts.degrees = replace(trainer._parts.degrees, tensor=tensor)  # of as many ranks, were this one of two
    trainer._checkpoints.restore()
    num_recent = len(trainer._parts.selective.state_dict()["recent"])
    trainer._checkpoints.close()
    trainer._parts.close()
    if tensor == 1:
        assert (num_recent, notes.events) == (96, [])
    else:
        assert (num_recent, notes.events) == (0, [("selective_backprop_emptied", {"step": 3, "plan": "single"})])


def test_selective_backprop_may_begin_when_a_run_goes_on(tmp_path: Path) -> None:
    train_toy(tmp_path, stop={"steps": 3})
    outcome = train_toy(tmp_path, stop={"steps": 6}, selective_backprop={"beta": 1.0})
    assert outcome.result.steps == 6
    assert "selective_backprop_emptied" not in dict(outcome.log.events)
