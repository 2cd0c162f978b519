"""Local SGD and DiLoCo go on when processes die, when workers join late, and after a resumption."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from test_asynchronous_faults import KillingLog, Processes, spec_of
from torch import Tensor

from shoal.libs.asynchronous.replicas import ForkedProcess, fit_replicas
from train_task import Toy


class DyingThird(Toy):
    """Worker 2 dies in its first step, whenever it is replaced."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        if multiprocessing.current_process().name == "worker 2":
            os.kill(os.getpid(), 9)
        return super().loss(outputs, batch)


class LateProcesses(Processes):
    """Worker 2 gets its place to run only when the chief has reported step 20."""

    def __init__(self) -> None:
        super().__init__()
        self.log: KillingLog

    def start(self, name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> Any:
        if name != "worker 2":
            return super().start(name, target, arguments)
        return _Placed(
            lambda: bool(self.log.steps) and self.log.steps[-1] >= 20, super().start, name, target, arguments
        )


class _Placed:
    """A ProcessHandle that begins once `is_due`."""

    def __init__(self, is_due: Callable[[], bool], start: Callable[..., ForkedProcess], *what: Any) -> None:
        self._is_due, self._start, self._what = is_due, start, what
        self._process: ForkedProcess | None = None

    def poll(self) -> str | None:
        if self._process is None and self._is_due():
            self._process = self._start(*self._what)
        return None if self._process is None else self._process.poll()

    def end(self) -> None:
        if self._process is not None:
            self._process.end()


def test_a_run_without_a_barrier_goes_on_when_a_worker_a_server_and_the_chief_are_killed(tmp_path: Path) -> None:
    sync = {"kind": "diloco", "every": 4, "servers": 2, "quorum": 1, "grace_s": 0.2, "outer_momentum": 0.5}
    processes = Processes()
    log = KillingLog(processes, {15: "worker 1", 35: "server 1", 60: "worker 0"})
    outcome = fit_replicas(
        spec_of(sync=sync, workers=3, batch_size=48), "run", tmp_path, log, lambda: False, processes.start
    )
    assert (outcome.reason, processes.num_started) == ("steps", 5 + 3)
    assert outcome.metrics["loss"] < 0.7  # log(3) = 1.1 is chance
    assert [details["index"] for details in log.find("server_lost")] == [1]
    assert sorted(details["index"] for details in log.find("worker_lost")) == [0, 1]
    [counted] = log.find("staleness")
    assert counted["rounds"] > 0
    assert counted["updates"] == counted["rounds"] + counted["late"]


def test_a_worker_that_finds_its_place_late_joins_and_the_run_does_not_wait_for_it(tmp_path: Path) -> None:
    processes = LateProcesses()
    processes.log = log = KillingLog(processes, {})
    spec = spec_of(sync={"kind": "diloco", "every": 2}, workers=[2, 3], batch_size=48)
    outcome = fit_replicas(spec, "run", tmp_path, log, lambda: False, processes.start)
    assert outcome.reason == "steps"
    joined = [(details["index"], details["workers"]) for details in log.find("worker_joined")]
    assert joined[-1] == (2, 3)
    assert sorted(index for index, _ in joined) == [0, 1, 2]


def test_a_worker_that_dies_again_and_again_is_gone_and_the_others_go_on(tmp_path: Path) -> None:
    processes = Processes()
    log = KillingLog(processes, {})
    spec = spec_of(task=f"{__file__}:DyingThird", sync={"kind": "local_sgd", "every": 2}, workers=[2, 3], batch_size=48)
    outcome = fit_replicas(spec, "run", tmp_path, log, lambda: False, processes.start)
    assert outcome.reason == "steps"
    assert [details["index"] for details in log.find("worker_gone")] == [2]
    assert len(log.find("worker_lost")) == 3


def test_below_the_minimum_the_run_waits_and_says_so(tmp_path: Path) -> None:
    processes = Processes()
    log = KillingLog(processes, {20: "worker 1"})
    spec = spec_of(sync={"kind": "local_sgd", "every": 2}, workers=[2, 2])
    assert fit_replicas(spec, "run", tmp_path, log, lambda: False, processes.start).reason == "steps"
    assert log.find("workers_missing") == [{"workers": 1, "min_workers": 2}]


def test_the_outer_momentum_survives_a_resumption_with_another_number_of_servers(tmp_path: Path) -> None:
    """Plain SGD inside, so that no worker has state of its own."""

    def train(folder: str, steps: int, servers: int) -> dict[str, Tensor]:
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        spec = spec_of(
            stop={"steps": steps},
            args={"dropout": 0.0},
            optimizer={"name": "sgd", "momentum": 0.0, "learning_rate": 0.05},
            sync={"kind": "diloco", "every": 3, "servers": servers},
        )
        outcome = fit_replicas(spec, "run", place, KillingLog(Processes(), {}), lambda: False)
        assert outcome.weights is not None
        return safetensors.torch.load_file(outcome.weights)

    at_once = train("at once", 12, 1)
    train("resumed", 6, 1)
    torch.testing.assert_close(train("resumed", 12, 3), at_once, rtol=1e-5, atol=1e-6)


def test_the_bytes_of_a_step_are_those_that_were_predicted(tmp_path: Path) -> None:
    log = KillingLog(Processes(), {})
    spec = spec_of(sync={"kind": "diloco", "every": 4, "servers": 2, "fragments": 2}, args={"dropout": 0.0})
    fit_replicas(spec, "run", tmp_path, log, lambda: False)
    [found] = log.find("communication")
    assert abs(found["pushed_bytes_per_step"] / found["predicted_pushed_bytes_per_step"] - 1) < 0.05
