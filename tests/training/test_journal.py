"""What a Trainer tells the record of its run: what cannot be written for now, and a run that is another's by now."""

from __future__ import annotations

from contextlib import suppress

import pytest

import shoal.runs
from shoal.errors import RecordUnwritable, RunError
from shoal.parallel import World
from shoal.runs import RunRecorder
from shoal.runs.record import recorder as recording
from shoal.train.loop.trainer import Trainer
from shoal.train.reporting.event_log import RecordLog
from train_task import Toy
from training.test_trainer import spec_of


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


def test_who_was_superseded_hears_of_it() -> None:
    recorder = shoal.runs.create("train", "")
    take_over(recorder)
    with pytest.raises(RunError, match="was resumed by another process"):
        RecordLog(recorder).record_event("checkpoint_failed", step=3, error="no space")
    with pytest.raises(RunError, match="was resumed by another process"):
        RecordLog(recorder).flush()


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
