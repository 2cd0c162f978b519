"""Elastic synchronous training goes on when workers die or are asked to leave, and those that come have its weights."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from test_asynchronous_faults import KillingLog, Processes, spec_of
from torch import Tensor

from shoal.errors import RankLost
from shoal.libs.asynchronous.replicas import fit_replicas
from shoal.parallel import World
from shoal.train import Callback
from shoal.train.callback import TrainingState
from shoal.train.loop.trainer import Trainer
from shoal.train.task import make_task
from train_task import Toy


class DigestCallback(Callback):
    """Notes step and weights in a file of this process; sends signals to this process after named steps, once each,
    when the workers that died earlier have been replaced."""

    def __init__(self, folder: Path, faults: dict[str, int]) -> None:
        self._folder, self._faults = folder, faults  # e.g. "worker 1 KILL": 20
        self._name = multiprocessing.current_process().name

    def on_step(self, state: TrainingState) -> None:
        digest = hashlib.sha256()
        for each in state.model[0].state_dict().values():
            digest.update(each.numpy().tobytes())
        with (self._folder / f"digests of {self._name}, {os.getpid()}").open("a") as file:
            file.write(f"{state.step} {digest.hexdigest()}\n")
        for fault, step in self._faults.items():
            mark = self._folder / fault
            earlier = [each.rpartition(" ")[0] for each, other in self._faults.items() if other < step]
            is_due = state.step >= step and all(map(self._is_replaced, earlier))
            if fault.startswith(self._name) and is_due and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), getattr(signal, f"SIG{fault.split()[-1]}"))

    def _is_replaced(self, worker: str) -> bool:
        return len(list(self._folder.glob(f"digests of {worker}, *"))) > 1


class Digested(Toy):
    """Its weights after each step are in `folder`."""

    def __init__(self, *, folder: str, faults: dict[str, int], **changes: Any) -> None:
        super().__init__(dropout=0.0, **changes)
        self._folder, self._faults = folder, faults

    def callbacks(self) -> list[Callback]:
        return [DigestCallback(Path(self._folder), self._faults)]


class DyingAgain(Toy):
    """Worker 1 dies in its first step, whenever it is replaced."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        if multiprocessing.current_process().name == "worker 1":
            os.kill(os.getpid(), 9)
        return super().loss(outputs, batch)


class Run:
    """One run in processes of its own, which is over."""

    def __init__(self, folder: Path, faults: dict[str, int], steps: int = 60, **changes: Any) -> None:
        args = {"folder": str(folder), "faults": faults, "step_s": changes.pop("step_s", 0.02)}
        base = {"task": f"{__file__}:Digested", "args": args, "sync": "all_reduce", "workers": [1, 2]}
        self.log = KillingLog(Processes(), {})
        spec = spec_of(**{**base, "stop": {"steps": steps}, **changes})
        self.outcome = fit_replicas(spec, "run", folder, self.log, lambda: False)
        self.digests: dict[int, dict[str, str]] = defaultdict(dict)  # by step and process
        for file in folder.glob("digests of *"):
            for line in file.read_text().splitlines():
                step, digest = line.split()
                self.digests[int(step)][file.name] = digest

    def require_equal_weights(self) -> int:
        """The number of steps after which two processes had weights."""
        for step, found in self.digests.items():
            assert len(set(found.values())) == 1, step
        return sum(len(found) == 2 for found in self.digests.values())


def test_survivors_and_replacements_have_equal_weights_when_a_worker_and_the_chief_are_killed(tmp_path: Path) -> None:
    run = Run(tmp_path, {"worker 1 KILL": 15, "worker 0 KILL": 45}, steps=300)
    assert run.outcome.reason == "steps"
    assert run.outcome.metrics["loss"] < 0.7  # log(3) = 1.1 is chance
    assert run.require_equal_weights() > 30
    assert [details["index"] for details in run.log.find("worker_lost")] == [1, 0]
    assert sorted(run.digests) == list(range(1, 301))  # no step was repeated or left out
    [summary] = run.log.find("elastic")
    assert summary == {"healed": 3, "restarts": 0}


@pytest.mark.soak
def test_a_worker_that_gets_a_notice_leaves_between_two_steps_and_is_replaced(tmp_path: Path) -> None:
    run = Run(tmp_path, {"worker 1 TERM": 15, "worker 0 TERM": 45}, steps=150)
    assert run.outcome.reason == "steps"
    assert [details["index"] for details in run.log.find("worker_departed")] == [1, 0]
    assert run.log.find("worker_lost") == []
    assert run.require_equal_weights() > 30
    assert sorted(run.digests) == list(range(1, 151))


@pytest.mark.soak
def test_when_all_get_a_notice_or_die_the_run_goes_on(tmp_path: Path) -> None:
    """After the notice no step is lost; after the deaths the newest checkpoint is where all begin again."""
    faults = {"worker 0 TERM": 10, "worker 1 TERM": 10, "worker 0 KILL": 40, "worker 1 KILL": 40}
    run = Run(tmp_path, faults, workers=[2, 2], checkpoint={"every_steps": 15})
    assert (run.outcome.reason, run.outcome.steps) == ("steps", 60)
    assert sorted(details["index"] for details in run.log.find("worker_departed")) == [0, 1]
    assert sorted(details["index"] for details in run.log.find("worker_lost")) == [0, 1]
    [summary] = run.log.find("elastic")
    assert summary["restarts"] == 1
    assert [details["step"] for details in run.log.find("restored")][-1] == 30
    run.require_equal_weights()  # also those of the steps that were taken twice
    assert sorted(run.digests) == list(range(1, 61))


def test_with_all_workers_its_weights_are_those_of_one_process_resumed_or_not(tmp_path: Path) -> None:
    def train(name: str, steps: int, make: Callable[[Path, int], Any]) -> dict[str, Tensor]:
        place = tmp_path / name
        place.mkdir(exist_ok=True)
        outcome = make(place, steps)
        assert (outcome.steps, outcome.weights is not None) == (steps, True)
        return safetensors.torch.load_file(outcome.weights)

    def train_alone(place: Path, steps: int) -> Any:
        spec = spec_of(stop={"steps": steps}, args={"dropout": 0.0}, sync="all_reduce", workers=1, **settings)
        return Trainer(spec, make_task(spec.task, spec.args), World.single("cpu"), place).run()

    def train_elastically(place: Path, steps: int) -> Any:
        return Run(place, {}, steps, workers=[2, 2], **settings).outcome

    settings = {"clip_norm": 0.5, "average": 0.9}
    alone = train("alone", 12, train_alone)
    torch.testing.assert_close(train("at once", 12, train_elastically), alone, rtol=1e-4, atol=1e-5)
    train("resumed", 5, train_elastically)
    torch.testing.assert_close(train("resumed", 12, train_elastically), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.soak
def test_a_run_that_needs_all_its_workers_ends_when_one_dies_again_and_again(tmp_path: Path) -> None:
    spec = spec_of(task=f"{__file__}:DyingAgain", sync="all_reduce", workers=[2, 2])
    with pytest.raises(RankLost, match="worker 1 died 3 times"):
        fit_replicas(spec, "run", tmp_path, KillingLog(Processes(), {}), lambda: False)
