"""Training on iterables: their epochs end where their last batch was used, and evaluations are due then."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal.data import Data
from shoal.errors import ConfigError
from shoal.testing.run import MemoryLog
from shoal.train.launch.validate import validate_run
from train_task import Points, Toy
from training.toy_run import spec_of, train_toy

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


def test_an_epoch_ends_with_its_last_batch_and_is_evaluated_then(tmp_path: Path) -> None:
    run = train_toy(tmp_path, Streamed(), stop={"epochs": 3})
    assert (run.result.reason, run.result.steps) == ("epochs", 12)
    assert list(run.log.get_curve("validation/loss")) == [4, 8, 12]
    assert run.log.metrics[12]["train/epoch"] == 3.0
    again = train_toy(tmp_path, Streamed(), stop={"epochs": 3})
    assert (again.result.reason, again.result.steps) == ("epochs", 12)


def test_a_stream_that_goes_on_has_the_losses_of_the_undisturbed_one(tmp_path: Path) -> None:
    spec = spec_of(stop={"epochs": 3}, evaluate={"every_epochs": 2})
    whole = train_toy(tmp_path / "whole", Streamed(), spec)
    assert list(whole.log.get_curve("validation/loss")) == [8, 12]
    log = MemoryLog()
    for steps in (4, 2, None):
        train_toy(tmp_path, Streamed(), spec, log=log, interrupt_after=steps)
    assert log.losses == whole.losses


def test_a_target_alone_ends_a_stream_when_an_epoch_meets_it(tmp_path: Path) -> None:
    outcome = train_toy(tmp_path, Streamed(), stop={"target": "accuracy>=0.9"}).result
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
