"""The facts of a check are those that the job finds, and are taken for no other run."""

from pathlib import Path
from typing import Any

import pytest

from shoal.train.launch import checked_run
from shoal.train.launch.validate import validate_run
from shoal.train.spec import TrainSpec

TASK = """
import shoal, torch
from torch.utils.data import TensorDataset

class Line(shoal.Task):
    def __init__(self, *, width: int = 1):
        self.width = width
    def model(self): return torch.nn.Linear(self.width, 1)
    def data(self): return shoal.Data(train=TensorDataset(torch.ones(64, self.width), torch.ones(64, 1)))
    def loss(self, outputs, batch): return (outputs - batch[1]).square().mean()
"""


@pytest.fixture
def num_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[TrainSpec]:
    """The specs that were checked."""
    checks: list[TrainSpec] = []

    def validate(spec: TrainSpec) -> Any:
        checks.append(spec)
        return validate_run(spec)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checked_run, "validate_run", validate)
    monkeypatch.setenv(checked_run.VARIABLE, checked_run.PRINT)
    (tmp_path / "line.py").write_text(TASK)
    return checks


def spec_of(**changes: Any) -> TrainSpec:
    return TrainSpec.parse({"task": "line.py:Line", "stop": {"steps": 1}, **changes})


def hand_on(printed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `shoal run` does."""
    assert printed.startswith(checked_run.PREFIX)
    monkeypatch.setenv(checked_run.VARIABLE, printed.removeprefix(checked_run.PREFIX))


def test_the_facts_of_a_check_are_found_again(
    num_checks: list[TrainSpec], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = checked_run.check_once(spec_of())
    hand_on(capsys.readouterr().out, monkeypatch)
    assert checked_run.check_once(spec_of()) == first
    assert len(num_checks) == 1
    assert first.num_parameters == 2


def test_another_spec_or_source_is_checked_anew(
    num_checks: list[TrainSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked_run.check_once(spec_of())
    hand_on(capsys.readouterr().out, monkeypatch)
    assert checked_run.check_once(spec_of(args={"width": 3})).num_parameters == 4
    (tmp_path / "line.py").write_text(TASK.replace("batch[1])", "batch[1] - 1)"))
    checked_run.check_once(spec_of())
    assert len(num_checks) == 3


def test_without_the_variable_each_call_checks_and_prints_nothing(
    num_checks: list[TrainSpec], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(checked_run.VARIABLE)
    checked_run.check_once(spec_of())
    checked_run.check_once(spec_of())
    assert len(num_checks) == 2
    assert not capsys.readouterr().out
