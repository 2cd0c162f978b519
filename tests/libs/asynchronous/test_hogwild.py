"""Hogwild: lanes train one copy of the weights, as threads and as processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.errors import ConfigError, RankLost, TrainError
from shoal.libs.asynchronous import hogwild
from shoal.parallel import World
from shoal.train.loop.replica import TrainReplica
from shoal.train.loop.trainer import Trainer
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec
from shoal.train.task import make_task
from train_task import Toy


class DyingLane(Toy):
    """A process that another has started dies in its first step."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        if multiprocessing.parent_process() is not None and torch.is_grad_enabled():
            os.kill(os.getpid(), 9)
        return super().loss(outputs, batch)


class RaisingLane(Toy):
    """A lane besides lane 0 raises an error of the Task's own."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        is_thread = threading.current_thread() is not threading.main_thread()
        if torch.is_grad_enabled() and (is_thread or multiprocessing.parent_process() is not None):
            raise LookupError("no such class")
        return super().loss(outputs, batch)


TOY = f"{Path(__file__).parents[2] / 'train_task.py'}:Toy"


class Log:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Not kept."""

    def record_event(self, kind: str, /, **details: object) -> None:
        self.events.append((kind, details))

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """Not kept."""

    def flush(self) -> None:
        """Nothing is waiting."""


def train(folder: Path, mode: str, steps: int, log: Log | None = None, **changes: Any) -> TrainResult:
    spec = TrainSpec.parse(
        {
            "task": TOY,
            "args": {"dropout": 0.0},
            "batch_size": 32,
            "sync": {"hogwild": 2, "hogwild_mode": mode},
            "stop": {"steps": steps},
            "log_every_steps": 1,
            "threads": 1,
            **changes,
        }
    )
    log, world = log or Log(), World.single("cpu")
    return Trainer(spec, make_task(spec.task, spec.args), world, folder, journal=log).run()


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_lanes_learn_and_their_steps_count(tmp_path: Path, mode: str) -> None:
    outcome = train(tmp_path, mode, 150)
    assert outcome.steps >= 150
    assert outcome.metrics["loss"] < 0.7  # log(3) = 1.1 is chance
    resumed = train(tmp_path, mode, 170)  # from the checkpoint of the first
    assert resumed.steps >= 170


def test_the_trial_keeps_one_kind_and_reports_both_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hogwild, "TRIAL_S", 0.2)
    log = Log()
    train(tmp_path, "auto", 400, log, args={"dropout": 0.0, "step_s": 0.005})
    [details] = [details for kind, details in log.events if kind == "hogwild"]
    rates = {mode: details[f"{mode}_steps_per_s"] for mode in ("threads", "processes")}
    assert details["mode"] == max(rates, key=lambda mode: rates[mode])
    assert min(rates.values()) > 0


def test_lanes_on_a_gpu_are_refused_by_name() -> None:
    spec = TrainSpec.parse({"sync": {"hogwild": 2}, "stop": {"steps": 1}})
    replica = TrainReplica.__new__(TrainReplica)
    fields = {
        "config": spec.applied_sync,
        "world": World(0, 1, torch.device("cuda", 0)),
        "parts": None,
        "journal": None,
    }
    for name, value in fields.items():
        object.__setattr__(replica, name, value)
    with pytest.raises(ConfigError, match=r"sync.hogwild = 2: .*this run is on cuda. use device=cpu"):
        hogwild.HogwildSync(replica)


def test_a_lane_that_dies_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RankLost, match=r"lane 1 of Hogwild \(processes\) has died"):
        train(tmp_path, "processes", 100_000, task=f"{__file__}:DyingLane")


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_an_error_in_a_lane_ends_the_run_with_its_cause_and_its_place(tmp_path: Path, mode: str) -> None:
    with pytest.raises(TrainError, match=rf"^lane 1 of Hogwild \({mode}\): LookupError: no such class\n") as raised:
        train(tmp_path, mode, 100_000, task=f"{__file__}:RaisingLane")
    assert f'File "{__file__}"' in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"workers": 2}, "hogwild"),
        ({"batch_size": 33}, "hogwild"),
        ({"sync": {"kind": "parameter_server", "hogwild": 2}}, "hogwild"),
        ({"parallel": {"tensor": 2}}, "parallel"),
        ({"average": 0.9}, "average"),
    ],
)
def test_what_lanes_cannot_do_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        TrainSpec.parse({"task": TOY, "batch_size": 32, "sync": {"hogwild": 2}, "stop": {"steps": 1}, **changes})
