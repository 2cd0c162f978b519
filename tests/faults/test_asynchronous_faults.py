"""Asynchronous training goes on when a server, a worker and the chief are killed, each at a named step."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.torch
import torch
from torch import Tensor

from shoal.errors import RankLost, TrainError
from shoal.parallel import World
from shoal.train.launch.parameter_server import ForkedProcess, fit_replicas
from shoal.train.loop.trainer import Trainer
from shoal.train.spec import TrainSpec
from shoal.train.task import make_task
from train_task import Toy

TOY = f"{Path(__file__).parents[1] / 'train_task.py'}:Toy"


class Dying(Toy):
    """A worker dies in its first step."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        os.kill(os.getpid(), 9)
        return super().loss(outputs, batch)


class Processes:
    """Starts the processes of a run, and kills them by name."""

    def __init__(self) -> None:
        self.running: dict[str, ForkedProcess] = {}
        self.num_started = 0

    def start(self, name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> ForkedProcess:
        self.running[name] = process = ForkedProcess(name, target, arguments)
        self.num_started += 1
        return process

    def kill(self, name: str) -> None:
        os.kill(self.running[name].pid, 9)


class KillingLog:
    """An event log that kills processes at the steps that the chief reports."""

    def __init__(self, processes: Processes, kills: Mapping[int, str]) -> None:
        self._processes, self._kills = processes, dict(kills)
        self.steps: list[int] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)
        for due in [each for each in self._kills if each <= step]:
            self._processes.kill(self._kills.pop(due))

    def record_event(self, kind: str, /, **details: object) -> None:
        self.events.append((kind, details))

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """Not kept."""

    def flush(self) -> None:
        """Nothing is waiting."""

    def find(self, kind: str) -> list[dict[str, Any]]:
        return [details for found, details in self.events if found == kind]


def spec_of(**changes: Any) -> TrainSpec:
    base = {
        "task": TOY,
        "args": {"step_s": 0.02, "dropout": 0.0},
        "workers": 2,
        "batch_size": 32,
        "sync": {"kind": "parameter_server", "servers": 2, "staleness": 2},
        "log_every_steps": 1,
        "stop": {"steps": 120},
        "threads": 1,
    }
    return TrainSpec.parse({**base, **changes})


def test_a_run_goes_on_when_a_server_a_worker_and_the_chief_are_killed(tmp_path: Path) -> None:
    processes = Processes()
    log = KillingLog(processes, {10: "server 1", 40: "worker 1", 70: "worker 0"})
    outcome = fit_replicas(spec_of(), "run", tmp_path, log, lambda: False, processes.start)
    assert outcome.reason == "steps"
    assert outcome.steps >= 120
    assert outcome.weights is not None
    assert outcome.weights.is_file()
    assert outcome.metrics["loss"] < 0.7  # log(3) = 1.1 is chance
    assert processes.num_started == 4 + 3
    assert [details["index"] for details in log.find("server_lost")] == [1]
    assert sorted(details["index"] for details in log.find("worker_lost")) == [0, 1]
    assert log.steps == sorted(log.steps)  # the run never went back
    [counted] = log.find("staleness")
    assert counted["updates"] >= 2 * 120
    # τ counts the updates of others between a pull and its update: a bound of 2 steps lets 2 workers be 2 * 2 apart,
    # and one more while the push is under way.
    assert max(map(int, counted["counts"])) <= 5
    assert 0 <= counted["lost"] < counted["updates"]


def test_a_process_that_dies_again_and_again_ends_the_run(tmp_path: Path) -> None:
    processes = Processes()
    spec = spec_of(task=f"{__file__}:Dying")
    with pytest.raises(RankLost, match=r"worker [01] died 3 times: status -9"):
        fit_replicas(spec, "run", tmp_path, KillingLog(processes, {}), lambda: False, processes.start)


def test_an_error_of_the_task_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    processes = Processes()
    spec = spec_of(args={"fault": "nan", "fault_step": 3, "notes": str(tmp_path)})
    with pytest.raises(TrainError, match=r"worker [01]: the loss of step 4|NaN|finite"):
        fit_replicas(spec, "run", tmp_path, KillingLog(processes, {}), lambda: False, processes.start)
    assert all(process.poll() is not None for process in processes.running.values())


def test_a_run_that_waits_for_all_is_that_of_one_process_resumed_or_not(tmp_path: Path) -> None:
    """Staleness 0: weights of 12 steps, those of a run ended after 5 and gone on with, and those of one process."""

    def train(folder: str, steps: int, **changes: Any) -> dict[str, Tensor]:
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        spec = spec_of(stop={"steps": steps}, args={"dropout": 0.0}, **changes)
        log = KillingLog(Processes(), {})
        if spec.sync.kind == "all_reduce":
            trainer = Trainer(spec, make_task(spec.task, spec.args), World.single("cpu"), place, journal=log)
            outcome = trainer.run()
        else:
            outcome = fit_replicas(spec, "run", place, log, lambda: False)
        assert outcome.steps == steps
        assert outcome.weights is not None
        return safetensors.torch.load_file(outcome.weights)

    waiting = {"kind": "parameter_server", "staleness": 0}
    alone = train("alone", 12, sync={"kind": "all_reduce"}, workers=1)
    at_once = train("at once", 12, sync={**waiting, "servers": 1})
    train("resumed", 5, sync={**waiting, "servers": 1})
    resumed = train("resumed", 12, sync={**waiting, "servers": 3}, workers=4)
    torch.testing.assert_close(at_once, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(resumed, alone, rtol=1e-4, atol=1e-5)


def test_no_process_outlives_the_one_that_started_it(tmp_path: Path) -> None:
    """Killed, so that it can end none of them, nor remove the folder of their sockets."""
    words = [sys.executable, "-m", "shoal.train", f"task={TOY}", "args.step_s=0.02", "workers=2", "batch_size=32"]
    words += ["sync.kind=parameter_server", "sync.servers=2", "log_every_steps=1", "stop.steps=100000", "threads=1"]
    short = Path(tempfile.gettempdir(), f"shoal-test-{os.getpid()}")  # a socket's path has at most 107 characters
    short.mkdir()
    home = {**os.environ, "SHOAL_HOME": str(tmp_path), "TMPDIR": str(short), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, env=home, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        next(started.stdout)  # the first line about a step
        below = psutil.Process(started.pid).children(recursive=True)
        assert len(below) >= 4
        started.kill()
    _, alive = psutil.wait_procs(below, timeout=20.0)
    shutil.rmtree(short)
    assert alive == []
