"""The record of a resumed run whose words are refused, or which has nothing to go on from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import shoal.runs
from shoal.errors import ShoalError
from shoal.runs import Status
from shoal.train.__main__ import main
from shoal.train.alone import train_here
from shoal.train.recipe import spec_from_words

TASK = Path(__file__).parents[1] / "train_task.py"
WORDS = [f"task={TASK}:Toy", "batch_size=32", "threads=1", "log_every_steps=1", "stop.steps=4"]


def trained() -> shoal.runs.Run:
    return shoal.runs.load(train_here(spec_from_words(WORDS), registers=False).run_id)


@pytest.mark.parametrize("words", [["seed=5"], ["optimizer.name=sgd"]])
def test_words_that_are_refused_leave_the_record_as_it_was(words: list[str]) -> None:
    run = trained()
    with pytest.raises(ShoalError):
        train_here(spec_from_words([f"resume={run.id}", "stop.steps=6", *words]), registers=False)
    refused = shoal.runs.load(run.id)
    assert (refused.spec, (run.folder / "spec.yaml").read_text()) == (run.spec, run.spec)
    assert refused.status is Status.FAILED
    train_here(spec_from_words([f"resume={run.id}", "stop.steps=6"]), registers=False)
    assert shoal.runs.load(run.id).latest()["train/step"] == 6


def test_words_with_which_it_trained_stay_whatever_comes_then() -> None:
    run = trained()
    fault = ["args.fault=raise", f"args.notes={run.folder}", "args.fault_step=1", "stop.steps=9"]
    with pytest.raises(ValueError, match="a fault of the user's own"):
        train_here(spec_from_words([f"resume={run.id}", *fault]), registers=False)
    assert "steps: 9" in shoal.runs.load(run.id).spec


def test_a_run_without_a_checkpoint_says_that_it_begins_again(capsys: pytest.CaptureFixture[str]) -> None:
    run = trained()
    shutil.rmtree(run.folder / "checkpoints")
    assert main([f"resume={run.id}", "stop.steps=6"]) == 0
    assert f"run {run.id} had no checkpoint: it began again, at step 0" in capsys.readouterr().out
    assert main([f"resume={run.id}", "stop.steps=7"]) == 0
    assert "had no checkpoint" not in capsys.readouterr().out


def test_more_processes_than_there_are_cannot_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "workers=2", "parallel=ddp"]) == 1
    assert "error: workers = '2': here is one process. start them with torchrun" in capsys.readouterr().err
