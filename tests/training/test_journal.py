"""The record of a run and what is printed of it: what cannot be written now, a run that is another's, what is said."""

import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest

import shoal.runs
from programs import RanksFailed, run_ranks
from shoal.errors import ConfigError, RecordUnwritable, RunError, ShoalError
from shoal.parallel import World
from shoal.runs import RunRecorder, Status
from shoal.runs.event_messages import format_warning
from shoal.runs.record import recorder
from shoal.runs.record import recorder as recording
from shoal.runs.record.event_log import NullLog, RecordLog
from shoal.train.__main__ import main
from shoal.train.launch.local import fit_locally
from shoal.train.launch.overrides import spec_from_overrides
from shoal.train.loop.trainer import Trainer
from shoal.train.reporting import console
from shoal.train.reporting.console import ConsoleLog
from train_task import Toy
from training.toy_run import spec_of


def take_over(recorder: RunRecorder) -> None:
    """As another process does that resumes the run."""
    with recorder._connection as connection:
        connection.execute("UPDATE runs SET incarnation = incarnation + 1 WHERE id = ?", (recorder.id,))


def test_what_finds_no_room_while_the_disk_is_full_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = shoal.runs.create("train", "")

    def full(connection: object) -> None:
        raise RecordUnwritable("the run record cannot be written: database or disk is full")

    with monkeypatch.context() as while_full:
        while_full.setattr(recording, "transaction", full)
        while_full.setattr(recording, "MAX_PENDING", 3)
        for step in range(1, 6):
            RecordLog(recorder).log(step, {"train/loss": 1 / step})
        assert recorder._pending.num_rows == 3
    recorder.finish("finished")
    recorder.close()
    assert shoal.runs.load(recorder.id).metrics()["train/loss"].tolist() == [1.0, 1 / 2, 1 / 3]


def test_a_run_that_was_taken_over_makes_no_more_checkpoints() -> None:
    recorder = shoal.runs.create("train", "")

    def should_stop() -> bool:
        if trainer._progress.step == 5:
            take_over(recorder)
        return False

    spec = spec_of(stop={"steps": 9}, checkpoint={"every_steps": 2})
    trainer = Trainer(
        spec, Toy(), World.single("cpu"), recorder.folder, journal=RecordLog(recorder), should_stop=should_stop
    )
    with pytest.raises(RunError, match="was resumed by another process"):
        trainer.run()
    saved = sorted(path.name for path in (recorder.folder / "checkpoints").glob("step-*"))
    assert saved == ["step-000000002", "step-000000004"]


@pytest.mark.parametrize("saved", [4, 0])
def test_the_record_has_no_steps_that_were_given_up(saved: int) -> None:
    """From the newest checkpoint, or from the beginning where there is none."""
    recorder = shoal.runs.create("train", "")
    words = {"stop": {"steps": 9}, "checkpoint": {"every_steps": 4 if saved else 99, "asynchronous": False}}
    args = {"notes": str(recorder.folder), "fault": "raise", "fault_step": 7}
    for _ in range(2):
        trainer = Trainer(
            spec_of(**words), Toy(**args), World.single("cpu"), recorder.folder, journal=RecordLog(recorder)
        )
        recorder.log(20, {"train/loss": 0.0})  # of a later step than the new life comes to
        with suppress(ValueError):
            trainer.run()
    recorder.finish("finished")
    recorder.close()
    run = shoal.runs.load(recorder.id)
    losses = run.metrics()["train/loss"].dropna()
    assert losses.index.tolist() == list(range(1, 10))
    assert run.latest()["train/step"] == 9
    assert dict(run.last_events())["training"]["step"] == saved


TASK = Path(__file__).parents[1] / "train_task.py"
WORDS = [f"task={TASK}:Toy", "batch_size=32", "threads=1", "log_every_steps=1", "stop.steps=4"]


def trained() -> shoal.runs.Run:
    return shoal.runs.load(fit_locally(spec_from_overrides(WORDS), registers=False).run_id)


def test_words_that_are_refused_leave_the_record_as_it_was() -> None:
    run = trained()
    for words in (["seed=5"], ["optimizer.name=sgd"]):
        with pytest.raises(ShoalError):
            fit_locally(spec_from_overrides([f"resume={run.id}", "stop.steps=6", *words]), registers=False)
        refused = shoal.runs.load(run.id)
        assert (refused.spec, (run.folder / "spec.yaml").read_text()) == (run.spec, run.spec)
        assert refused.status is Status.FAILED
    fit_locally(spec_from_overrides([f"resume={run.id}", "stop.steps=6"]), registers=False)
    assert shoal.runs.load(run.id).latest()["train/step"] == 6


def test_values_keep_the_time_at_which_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained()
    before, clock = run.metrics()["time"], time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 1000.0)
    said: list[str] = []
    fit_locally(spec_from_overrides([f"resume={run.id}", "stop.steps=6"]), registers=False, say=said.append)
    after = shoal.runs.load(run.id).metrics()["time"]
    assert after[:4].to_list() == pytest.approx(before[:4].to_list(), abs=500.0)
    assert (after[4:] > 900.0).all()
    assert not [line for line in said if line.startswith("step      4")]


def test_words_with_which_it_trained_stay_whatever_comes_then() -> None:
    run = trained()
    fault = ["args.fault=raise", f"args.notes={run.folder}", "args.fault_step=1", "stop.steps=9"]
    with pytest.raises(ValueError, match="a fault of the user's own"):
        fit_locally(spec_from_overrides([f"resume={run.id}", *fault]), registers=False)
    assert "steps: 9" in shoal.runs.load(run.id).spec


def train_until_killed(world: World, words: list[str]) -> None:
    """The program of a process whose record is written now and then, and whose steps are quicker."""
    recorder.FLUSH_INTERVAL_S = 1000.0
    fit_locally(spec_from_overrides(words), registers=False)


def test_what_a_checkpoint_outlives_is_in_the_record_when_the_process_is_killed(tmp_path: Path) -> None:
    """The process that resumes the run does not log those steps again."""
    words = [*WORDS, "stop.steps=200", "checkpoint.every_steps=30", f"args.notes={tmp_path}"]
    with pytest.raises(RanksFailed, match="exit code -9"):
        run_ranks(train_until_killed, 1, [*words, "args.fault=kill", "args.fault_step=66"])
    run = shoal.runs.load("latest")
    saved = max(int(path.name.removeprefix("step-")) for path in (run.folder / "checkpoints").glob("step-*"))
    assert saved in (30, 60)
    losses = run.metrics()["train/loss"].dropna()
    assert [step for step in losses.index if step <= saved] == list(range(1, saved + 1))


def test_a_run_without_a_checkpoint_says_that_it_begins_again(capsys: pytest.CaptureFixture[str]) -> None:
    run = trained()
    shutil.rmtree(run.folder / "checkpoints")
    assert main([f"resume={run.id}", "stop.steps=6"]) == 0
    assert "there is no checkpoint: it begins again, at step 0" in capsys.readouterr().out
    assert main([f"resume={run.id}", "stop.steps=7"]) == 0
    assert "no checkpoint" not in capsys.readouterr().out


def test_a_run_that_has_ended_is_not_resumed_for_nothing() -> None:
    run = trained()
    with pytest.raises(ConfigError, match=rf"resume = '{run.id}': has ended already \(4 steps\). say when it ends now"):
        fit_locally(spec_from_overrides([f"resume={run.id}", "seed=0"]))
    ended = shoal.runs.load(run.id)
    assert (ended.status, ended.incarnation) == (Status.FINISHED, run.incarnation)


def test_what_is_wrong_is_said_before_a_cost_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(f"from {TASK.stem} import Toy\n\nclass Wrong(Toy):\n    def data(self):\n        return [1, 2]\n")
    assert main([f"task={file}:Wrong", "stop.steps=2"]) == 1
    assert "Wrong.data gave a list. return shoal.data.Data(train=...)" in capsys.readouterr().err


def test_more_processes_than_there_are_cannot_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "workers=2", "parallel=ddp"]) == 1
    assert "error: workers = '2': here is one process. start them with torchrun" in capsys.readouterr().err


def test_progress_now_and_then_and_every_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now_s)
    said: list[str] = []
    journal = ConsoleLog(NullLog(), said.append)
    for step in range(1, 6):
        now_s += 0.75
        journal.log(step, {"train/loss": 1 / step})
    assert said == ["step      3 | train/loss 0.3333"]
    journal.log(5, {"validation/accuracy": 0.9})
    assert said[1:] == ["step      5 | validation/accuracy 0.9"]


@pytest.mark.parametrize(
    ("kind", "details", "words"),
    [
        ("checkpoint_failed", {"step": 9, "error": "step 9 could not be saved"}, "training goes on: step 9 could"),
        (
            "restored",
            {"step": 5, "damaged": ["step 10: a.bin is gone"]},
            "resumed at step 5; damaged, and passed over: step 10",
        ),
        ("restored", {"step": 5, "damaged": []}, "resumed at step 5"),
        ("workers_lost", {"step": 1234, "error": "a worker died"}, "workers were lost after step 1,234"),
        (
            "workers_lost",
            {"step": -1, "error": "a worker died"},
            "before the first step (a worker died): starting them",
        ),
        ("hosts_missing", {"workers": 4, "fit": 2, "wait_s": 600.0}, "which hold 2: waiting up to 10 min for another"),
        ("room_taken", {"workers": 4, "fit": 2, "wait_s": 600.0}, "(2 places are free): waiting up to 10 min for it"),
        ("no_checkpoint", {}, "begins again"),
        ("stopped", {"step": 5}, ""),
    ],
)
def test_what_goes_wrong_is_said_and_nothing_else(kind: str, details: dict[str, object], words: str) -> None:
    said: list[str] = []
    ConsoleLog(NullLog(), said.append).record_event(kind, **details)
    assert said == ([format_warning(kind, details)] if words else [])
    assert words in "".join(said)
