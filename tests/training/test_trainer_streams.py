"""Training on iterables: their epochs end where their last batch was used, and evaluations are due then."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal.data import Data
from shoal.errors import ConfigError
from shoal.parallel import World
from shoal.train.launch.validate import validate_run
from shoal.train.loop.trainer import Trainer
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec
from train_task import Points, Toy
from training.test_trainer import Notes, spec_of

HERE = "given_to_streams"


class Flowing:
    """The first points in their order, without a length."""

    deterministic = True

    def __init__(self, num_samples: int) -> None:
        self.points, self.num_samples = Points(256, 1), num_samples

    def __iter__(self) -> Iterator[Any]:
        return (self.points[index] for index in range(self.num_samples))


class Endless(Flowing):
    def __iter__(self) -> Iterator[Any]:
        return (self.points[index % 256] for index in itertools.count())


class Long(Flowing):
    def __len__(self) -> int:
        return self.num_samples


class Streamed(Toy):
    """Four batches of 32 an epoch, and some samples that make no batch."""

    def data(self) -> Data:
        return Data(Flowing(140), Points(50, 2))


class WithoutEnd(Toy):
    def data(self) -> Data:
        return Data(Endless(0), Points(50, 2))


class OfLength(Toy):
    def data(self) -> Data:
        return Data(Long(140), Points(50, 2))


def train_streamed(folder: Path, spec: TrainSpec, journal: Notes, **how: Any) -> TrainResult:
    return Trainer(spec, Streamed(), World.single("cpu"), folder, journal=journal, **how).run()


def evaluated(notes: Notes) -> list[int]:
    return sorted(step for step, row in notes.metrics.items() if "validation/loss" in row)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_ends_with_its_last_batch_and_is_evaluated_then(tmp_path: Path, workers: int) -> None:
    notes = Notes()
    outcome = train_streamed(tmp_path, spec_of(stop={"epochs": 3}, loader={"workers": workers}), notes)
    assert (outcome.reason, outcome.steps) == ("epochs", 12)
    assert evaluated(notes) == [4, 8, 12]
    assert notes.metrics[12]["train/epoch"] == 3.0
    again = train_streamed(tmp_path, spec_of(stop={"epochs": 3}), notes)
    assert (again.reason, again.steps) == ("epochs", 12)


def test_a_stream_that_goes_on_has_the_losses_of_the_undisturbed_one(tmp_path: Path) -> None:
    spec = spec_of(stop={"epochs": 3}, evaluate={"every_epochs": 2})
    whole = Notes()
    first = Notes()
    second = Notes()
    train_streamed(tmp_path / "whole", spec, whole)
    assert evaluated(whole) == [8, 12]
    for stopped_at in (4, 6):
        calls = itertools.count(1 if stopped_at == 4 else 5)
        train_streamed(tmp_path, spec, first, should_stop=lambda at=stopped_at, calls=calls: next(calls) >= at)
    train_streamed(tmp_path, spec, second)
    assert first.losses | second.losses == whole.losses


def test_a_target_alone_ends_a_stream_when_an_epoch_meets_it(tmp_path: Path) -> None:
    outcome = train_streamed(tmp_path, spec_of(stop={"target": "accuracy>=0.9"}), Notes())
    assert outcome.reason == "target"
    assert outcome.steps % 4 == 0


def test_a_stream_that_may_never_end_is_refused_without_an_evaluation_that_could_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType(HERE)
    module.__dict__.update(globals())
    monkeypatch.setitem(sys.modules, HERE, module)
    for stop in ({"target": "accuracy>=0.9"}, {"convergence": {"metric": "loss"}}):
        for task in ("WithoutEnd", "Streamed"):
            with pytest.raises(
                ConfigError, match=r"evaluate\.every_steps = None: .*give evaluate\.every_steps="
            ) as raised:
                validate_run(spec_of(task=f"{HERE}:{task}", stop=stop))
            assert raised.value.field == "evaluate.every_steps"
        validate_run(spec_of(task=f"{HERE}:OfLength", stop=stop))
        validate_run(spec_of(task=f"{HERE}:WithoutEnd", stop=stop, evaluate={"every_steps": 10}))
        validate_run(spec_of(task=f"{HERE}:WithoutEnd", stop={**stop, "steps": 100}))
