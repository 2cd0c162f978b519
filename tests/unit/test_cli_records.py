"""`shoal runs`, `shoal report` and `shoal models`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from shoal import runs
from shoal.cli.models import models
from shoal.cli.runs import report
from shoal.cli.runs import runs as runs_command
from shoal.errors import RegistryError, RunError
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.weights import WeightSnapshot


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    return tmp_path


def typed(command: click.Command, *words: str) -> str:
    result = CliRunner().invoke(command, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def record(run_id: str, status: str = "finished") -> None:
    with runs.create("cartpole", "a: 1\n", run_id, command="shoal run cartpole a=1") as run:
        run.log(10, {"return/mean_100": 480.0, "learner/loss": 0.5})
        run.endpoint("gateway", "gateway", "tcp://127.0.0.1:5600", "closed")
        run.model_registered("cartpole", 2, ("champion",))
        run.event("actor.joined", actor="[bold]a-1[/nonsense]")
        run.finish(status, "ValueError: [/red]" if status == "failed" else None)


def register(num_versions: int) -> None:
    signature = Signature(
        inputs=[TensorSignature(name="observation", datatype="FP32", shape=[-1, 4])],
        outputs=[TensorSignature(name="logits", datatype="FP32", shape=[-1, 2])],
    )
    for version in range(num_versions):
        weights = WeightSnapshot.of(40 + version, {"w": np.zeros((4, 2), np.float32)})
        Registry().register(
            "cartpole",
            weights,
            model=ModelFactory(factory="shoal.models:Net", kwargs={"hidden": 64}),
            signature=signature,
            run_id="run-1",
            metrics={"return": 480.5},
        )


def test_without_records_it_says_how_to_make_one() -> None:
    assert "no runs yet" in typed(runs_command)
    assert "shoal run --help" in typed(runs_command)
    assert "no models yet" in typed(models, "list")
    assert json.loads(typed(runs_command, "--json")) == []
    assert json.loads(typed(models, "list", "--json")) == []


def test_runs_lists_the_newest_first() -> None:
    for run_id in ("first", "second", "third"):
        record(run_id)
    lines = typed(runs_command, "--limit", "2").splitlines()
    assert lines[0].split() == ["run", "job", "status", "age", "duration", "best"]
    assert [line.split()[:3] for line in lines[1:3]] == [[name, "cartpole", "finished"] for name in ("third", "second")]
    assert lines[1].endswith("return/mean_100 480")
    assert "shoal runs third" in lines[3]
    assert [each["id"] for each in json.loads(typed(runs_command, "--json"))] == ["third", "second", "first"]


def test_one_run_is_shown_with_what_to_type_next() -> None:
    record("one", status="failed")
    shown = typed(runs_command, "one")
    for told in (
        *("failed", "ValueError: [/red]", "return/mean_100", "480", "tcp://127.0.0.1:5600", "cartpole@2", "champion"),
        *("actor.joined", "[bold]a-1[/nonsense]", "  shoal report one\n", "  shoal models show cartpole@2\n"),
        *("  tensorboard --logdir ", "  shoal run cartpole a=1\n"),
    ):
        assert told in shown, told
    told = json.loads(typed(runs_command, "latest", "--json"))
    assert (told["id"], told["status"], told["latest"]["learner/loss"]) == ("one", "failed", 0.5)


def test_an_unknown_run_is_a_run_error() -> None:
    record("one")
    with pytest.raises(RunError, match="did you mean one"):
        typed(runs_command, "ones")


def test_report_writes_the_page_of_the_newest_run(home: Path) -> None:
    record("one")
    page = home / "runs" / "one" / "report.html"
    assert typed(report, "--open-path") == f"{page}\n"
    assert page.exists()
    assert str(page) in typed(report, "one")


def test_models_are_listed_shown_promoted_and_rolled_back() -> None:
    register(3)
    listed = typed(models, "list").splitlines()
    assert [line.split()[0] for line in listed] == ["model", "cartpole@1", "cartpole@2", "cartpole@3"]
    assert "champion" in listed[3]
    assert "480.5" in listed[1]
    assert "cartpole@champion is cartpole@2 now" in typed(models, "rollback", "cartpole")
    promoted = typed(models, "promote", "cartpole@3", "--alias", "candidate")
    assert "cartpole@candidate is cartpole@3 now" in promoted
    assert "shoal models rollback cartpole --alias candidate" in promoted
    shown = typed(models, "show", "cartpole@champion")
    for told in (
        "cartpole@2",
        "weights version 41",
        "shoal.models:Net",
        '{"hidden": 64}',
        "FP32 [any, 4]",
        "rollback to 2",
    ):
        assert told in shown, told
    assert json.loads(typed(models, "show", "cartpole", "--json"))["aliases"] == ["candidate"]


def test_an_unknown_model_is_a_registry_error() -> None:
    with pytest.raises(RegistryError, match="shoal models list"):
        typed(models, "show", "cartpole@1")


@pytest.mark.parametrize("command", [runs_command, report, models, *models.commands.values()])
def test_every_help_has_examples(command: click.Command) -> None:
    shown = typed(command, "--help")
    assert "Examples:\n  " in shown
    assert "shoal " in shown
