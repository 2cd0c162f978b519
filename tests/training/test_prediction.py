"""What a run is predicted to cost, of models that can be trained, and not be looked at: said in words, and no error."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.train.launch.predicted_cost import predict_cost_details, predict_table
from shoal.train.spec import TrainSpec
from shoal.train.task import make_task
from train_task import FEATURES, Toy

HERE = "given_to_predict"


class Squeezed(Toy):
    """Its network takes no single sample."""

    class Network(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            output: Tensor = super().forward(input).squeeze()
            return output / output.shape[1]

    def model(self) -> nn.Module:
        return self.Network(nn.Linear(FEATURES, 3))


class Normalised(Toy):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 3))


class Wordless(Toy):
    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        raise ZeroDivisionError


@pytest.fixture(autouse=True)
def _module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(HERE)
    vars(module).update({each.__name__: each for each in (Squeezed, Normalised, Wordless)})
    monkeypatch.setitem(sys.modules, HERE, module)


@pytest.mark.parametrize(
    ("task", "changes", "reason"),
    [
        ("Squeezed", {}, "IndexError: tuple index out of range"),
        ("Normalised", {"batch_size": 1}, "ValueError: Expected more than 1 value per channel when training"),
        ("Wordless", {}, "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_looked_at_is_said(task: str, changes: dict[str, Any], reason: str) -> None:
    spec = TrainSpec.parse({"task": f"{HERE}:{task}", "batch_size": 16, "stop": {"steps": 1}, **changes})
    (note,) = predict_cost_details(spec)["notes"]
    assert note.startswith(f"not predicted: {reason}")
    with pytest.raises(ConfigError) as raised:
        predict_table(make_task(spec.task, spec.args), spec)
    assert (raised.value.field, raised.value.value) == ("task", spec.task)
    assert raised.value.problem.startswith(f"cannot be looked at before it runs: {reason}")


def test_what_can_be_looked_at_is_predicted() -> None:
    torch.manual_seed(0)
    spec = TrainSpec.parse({"task": f"{HERE}:Normalised", "batch_size": 16, "stop": {"steps": 1}})
    assert predict_cost_details(spec)["parameters"] == 2 * FEATURES + 3 * FEATURES + 3


def test_without_an_estimator_nothing_is_predicted_and_a_run_is_none_the_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.train.launch.predicted_cost.collect_extensions", lambda group: {})
    (note,) = predict_cost_details(TrainSpec(task="lenet"))["notes"]
    assert note == "not predicted: no library that predicts is installed"
    with pytest.raises(ConfigError, match="is predicted by a library"):
        predict_table(make_task("lenet", {}), TrainSpec(task="lenet"))
