"""Runs in the trackers, by their libraries: MLflow with a database, W&B with offline files; Trackio is a fake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal import runs
from shoal.libs.tracking import processes
from shoal.libs.tracking.follower import Follower, read_state
from shoal.libs.tracking.trackers import TrackioTracker
from train_task import Toy

SLOW_S = 600.0


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    return tmp_path


def test_a_training_run_is_in_mlflow(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the follower that the run starts, and what that one has not sent in time by the command."""
    monkeypatch.setattr(processes, "CLOSE_TIMEOUT_S", SLOW_S)
    result = shoal.fit(Toy, track=["mlflow"], stop={"steps": 12}, log_every_steps=1, threads=1, say=None)
    run = runs.load(result.run_id)
    [(_, details)] = run.list_events("tracked")
    state = read_state(run.folder, "mlflow")
    if details["problem"]:  # it has given up, on a slow machine
        words = [sys.executable, "-m", "shoal", "runs", "track", run.id, "--to", "mlflow"]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        state = read_state(run.folder, "mlflow")
    assert state.is_complete

    program = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
run = client.get_run(sys.argv[2])
history = {name: [[m.step, m.timestamp, m.value] for m in client.get_metric_history(sys.argv[2], name)]
           for name in run.data.metrics}
print(json.dumps([run.info.run_name, run.info.status, run.data.params, run.data.tags, history]))
"""
    uri = f"sqlite:///{home / 'mlflow.db'}"
    words = [sys.executable, "-c", program, uri, state.tracker_run]
    name, status, params, tags, history = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    assert (name, status) == (run.id, "FINISHED")
    assert params["stop.steps"] == "12"
    assert tags["shoal.run"] == run.id
    assert tags["shoal.model.toy"] == "toy@1"
    recorded = run.list_values(0.0, 1_000_000)
    assert {(each.step, each.name, int(each.time * 1000), each.value) for each in recorded} == {
        (step, metric, at, value) for metric, values in history.items() for step, at, value in values
    }


def test_a_process_that_is_killed_while_it_makes_mlflows_database_leaves_no_part_of_one(home: Path) -> None:
    program = """
import os
from sqlalchemy import Engine, event
from shoal.libs.tracking.trackers import MlflowTracker

@event.listens_for(Engine, "after_cursor_execute")
def end(connection, cursor, statement, *_):
    if "CREATE TABLE secrets" in statement:
        os._exit(7)

MlflowTracker().begin(None, "")
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 7
    after = (
        "from shoal.libs.tracking.trackers import MlflowTracker as T; print(T()._client.search_experiments()[0].name)"
    )
    done = subprocess.run([sys.executable, "-c", after], capture_output=True, text=True)
    assert done.stdout == "Default\n", done.stderr


def test_a_run_is_in_the_offline_files_of_wandb(home: Path) -> None:
    with runs.create("job", "task: lenet\nargs: {api_key: hidden-away}\n", "one") as recorder:
        for step in (3, 4, 2):  # it goes back
            recorder.log(step, {"loss": step / 8})
    words = [sys.executable, "-P", "-m", "shoal.libs.tracking", "one", "wandb"]
    done = subprocess.run(words, env={**os.environ, "WANDB_MODE": "offline"}, capture_output=True, text=True)
    state = read_state(home / "runs" / "one", "wandb")
    assert (done.returncode, state.sent, state.is_complete) == (0, 3, True), done.stderr
    [file] = (home / "runs" / "one" / "wandb").glob("offline-run-*/*.wandb")
    payload = file.read_bytes()
    losses = re.findall(rb"loss[^0-9a-z]{1,4}(0\.\d+)", payload)  # in the history, and in the summary after it
    assert list(dict.fromkeys(losses)) == [b"0.375", b"0.5", b"0.25"]
    assert all(text in payload for text in (b"shoal/step", b"loss", b"lenet"))
    assert b"hidden-away" not in payload


def test_a_run_is_in_trackio(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
