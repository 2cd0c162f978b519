"""Runs in the trackers, by their libraries: MLflow, W&B, a fake of Trackio, TensorBoard's files."""

import errno
import os
import re
import sqlite3
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from python_program import run_python
from shoal import runs
from shoal.libs.tracking.event_files import EventFile
from shoal.libs.tracking.follower import Follower, read_state
from shoal.libs.tracking.trackers import TrackioTracker
from shoal.runs import RunRecorder
from waiting import wait_for

# A process ends when MLflow's database has some of its tables, which MLflow can neither read nor complete. Then another
# follows the run.
FOLLOW = """
import os
import mlflow
from sqlalchemy import Engine, event
from shoal import runs
from shoal.libs.tracking.follower import Follower
from shoal.libs.tracking.trackers import MlflowTracker


def end(connection, cursor, statement, *_):
    if "CREATE TABLE runs" in statement:
        os._exit(7)

if (killed := os.fork()) == 0:
    event.listens_for(Engine, "after_cursor_execute")(end)
    MlflowTracker()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == 7
assert Follower(runs.load("one"), "mlflow", MlflowTracker).follow().is_complete
"""


def test_a_run_is_in_mlflow_though_a_process_was_killed_while_it_made_the_database(shoal_home: Path) -> None:
    with runs.create("train", "task: lenet\nstop: {steps: 12}\n", "one") as recorder:
        for step in range(1, 13):
            recorder.log(step, {"train/loss": 1 / step, "learning rate": 0.1})
        recorder.record_model("lenet", 1, [])
    run_python(FOLLOW)
    tracked = read_state(shoal_home / "runs" / "one", "mlflow").tracker_run

    with closing(sqlite3.connect(shoal_home / "mlflow.db")) as database:

        def select(columns: str, table: str) -> set[tuple[Any, ...]]:
            return {*database.execute(f"SELECT {columns} FROM {table} WHERE run_uuid = ?", [tracked])}

        assert select("name, status", "runs") == {("one", "FINISHED")}
        assert ("stop.steps", "12") in select("key, value", "params")
        assert {("shoal.run", "one"), ("shoal.model.lenet", "lenet@1")} <= select("key, value", "tags")
        sent = select("step, key, timestamp, value", "metrics")
    recorded = runs.load("one").list_values(0.0, 1_000_000)
    assert sent == {(each.step, each.name, int(each.time * 1000), each.value) for each in recorded}
    assert len(sent) == 24


def test_a_run_is_in_the_offline_files_of_wandb(shoal_home: Path) -> None:
    with runs.create("job", "task: lenet\nargs: {api_key: hidden-away}\n", "one") as recorder:
        for step in (3, 4, 2):  # it goes back
            recorder.log(step, {"loss": step / 8})
    words = [sys.executable, "-P", "-m", "shoal.libs.tracking", "one", "wandb"]
    done = subprocess.run(words, env={**os.environ, "WANDB_MODE": "offline"}, capture_output=True, text=True)
    state = read_state(shoal_home / "runs" / "one", "wandb")
    assert (done.returncode, state.sent, state.is_complete) == (0, 3, True), done.stderr
    [file] = (shoal_home / "runs" / "one" / "wandb").glob("offline-run-*/*.wandb")
    payload = file.read_bytes()
    losses = re.findall(rb"loss[^0-9a-z]{1,4}(0\.\d+)", payload)  # in the history, and in the summary after it
    assert list(dict.fromkeys(losses)) == [b"0.375", b"0.5", b"0.25"]
    assert all(text in payload for text in (b"shoal/step", b"loss", b"lenet"))
    assert b"hidden-away" not in payload


def test_a_run_is_in_trackio(shoal_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library needs an older Pillow than the other extras, and is not among the tests' own."""
    calls: list[tuple[str, Any]] = []
    fake = types.ModuleType("trackio")
    vars(fake).update(
        init=lambda **options: calls.append(("init", options)),
        log=lambda values, step: calls.append(("log", (step, values))),
        finish=lambda: calls.append(("finish", None)),
    )
    monkeypatch.setitem(sys.modules, "trackio", fake)
    with runs.create("job", "task: lenet\n", "one") as recorder:
        recorder.log(1, {"loss": 0.5, "accuracy": 0.25})
        recorder.log(2, {"loss": 0.25})
    assert Follower(runs.load("one"), "trackio", TrackioTracker).follow().is_complete
    (_, options), *others = calls
    assert (options["project"], options["name"], options["resume"]) == ("shoal", "one", "allow")
    assert options["config"]["task"] == "lenet"
    assert others == [("log", (1, {"loss": 0.5, "accuracy": 0.25})), ("log", (2, {"loss": 0.25})), ("finish", None)]


@pytest.fixture
def run() -> Iterator[RunRecorder]:
    recorder = runs.create("cartpole", "a: 1\n", "one")
    yield recorder
    recorder.close()


def test_tensorboard_shows_each_step_once_as_it_was_last_logged(run: RunRecorder) -> None:
    counts, edges = np.array([1, 2]), np.array([0.0, 0.5, 1.0])
    for step in range(1, 6):
        run.log(step, {"loss": float(step)})
        run.log_histogram(step, "weights", counts, edges)
    run.close()
    with runs.reopen("one") as again:
        again.log(4, {"loss": 4.0})  # as it was: a cluster that dies may take along what was said last
        again.log_histogram(6, "weights", counts, edges)
        again.log(5, {"loss": 50.0})
    shown = EventAccumulator(str(run.folder / "tensorboard"), size_guidance={"histograms": 0}).Reload()
    assert [(each.step, each.value) for each in shown.Scalars("loss")] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 50)]
    assert [each.step for each in shown.Histograms("weights")] == [1, 2, 3, 6]


def test_tensorboard_forgets_the_steps_that_were_given_up(run: RunRecorder) -> None:
    def shown() -> list[tuple[int, float]]:
        read = EventAccumulator(str(run.folder / "tensorboard")).Reload()
        scalars = read.Scalars("loss") if "loss" in read.Tags()["scalars"] else []
        return [(each.step, each.value) for each in scalars]

    counts, edges = np.array([1, 2]), np.array([0.0, 0.5, 1.0])
    run.log_histogram(1, "weights", counts, edges)
    for step in range(1, 6):
        run.log(step, {"loss": float(step)})
    wait_for(lambda: len(shown()) == 5)
    run.forget_after(3)
    wait_for(lambda: len(shown()) == 3)  # before anything more is said
    run.log(4, {"loss": 40.0})
    run.log(5, {"loss": 50.0})
    run.flush()
    run.forget_after(4)  # before the fifth is written, or after
    run.log_histogram(5, "weights", counts, edges)
    run.close()
    assert shown() == [(1, 1), (2, 2), (3, 3), (4, 40)]
    read = EventAccumulator(str(run.folder / "tensorboard"), size_guidance={"histograms": 0}).Reload()
    assert [each.step for each in read.Histograms("weights")] == [1, 5]


def test_a_full_disk_costs_the_curves_their_end_and_the_record_nothing(
    run: RunRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close = EventFile.close

    def full(file: EventFile) -> None:
        close(file)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(EventFile, "close", full)
    run.log(1, {"x": 1.0})
    run.finish("failed", "why it did")
    seen = runs.load("one")
    assert (seen.status, seen.error, seen.latest()) == (runs.Status.FAILED, "why it did", {"x": 1.0})
    assert "No space left on device" in caplog.text
