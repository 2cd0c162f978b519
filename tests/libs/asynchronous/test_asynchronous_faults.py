"""Runs of replicas go on when a server, a worker and the chief are killed, each at a named step, and when resumed."""

import hashlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import safetensors.torch
import torch
from torch import Tensor

import shoal.runs
from shoal import testing
from shoal.errors import RankLost, TrainError
from shoal.extend import PeerSync, SyncConfig
from shoal.libs.asynchronous.replicas import ForkedProcess, fit_replicas
from shoal.testing.run import MemoryLog
from shoal.train import Callback
from shoal.train.callback import TrainingState
from shoal.train.spec import TrainSpec
from shoal.train.task import make_task
from train_task import Toy
from waiting import wait_for

TOY = f"{Path(__file__).parents[2] / 'train_task.py'}:Toy"


class MeanConfig(SyncConfig):
    """Of a synchronizer of a user's own."""

    every: int = 4

    synchronizer: ClassVar[str] = "test_asynchronous_faults:MeanOfAll"


class MeanOfAll(PeerSync):
    config: MeanConfig

    def after_step(self) -> None:
        if self.num_steps % self.config.every == 0 and (found := self.gather(self.weights)):
            self.load_weights([torch.stack(each).mean(0) for each in zip(*found.values(), strict=True)])


class Raising(Toy):
    """A worker raises an error of the Task's own in its first step."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        raise LookupError("no such class")


class FaultySGD(torch.optim.SGD):
    num_steps = 0

    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        if self.num_steps > 3:  # the chief takes a step to see which state there is to restore
            raise LookupError("no such class")
        super().step(closure)


class RaisingStep(Toy):
    """A server raises it, in an update."""

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return FaultySGD(parameters, 0.1)


class Processes:
    """Starts the processes of a run, and kills them by name with a signal."""

    def __init__(self, number: int = signal.SIGKILL) -> None:
        self._signal = number
        self.running: dict[str, ForkedProcess] = {}
        self.num_started = 0

    def start(self, name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> ForkedProcess:
        self.running[name] = process = ForkedProcess(name, target, arguments)
        self.num_started += 1
        return process

    def kill(self, name: str) -> None:
        os.kill(self.running[name].pid, self._signal)


class KillingLog(MemoryLog):
    """An event log that kills processes at the steps that the chief reports."""

    def __init__(self, processes: Processes, kills: Mapping[int, str]) -> None:
        super().__init__()
        self._processes, self._kills = processes, dict(kills)
        self.steps: list[int] = []

    def log(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        super().log(step, values, at)
        self.steps.append(step)
        for due in [each for each in self._kills if each <= step]:
            self._processes.kill(self._kills.pop(due))

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


@pytest.mark.parametrize(
    ("sync", "workers", "kills"),
    [
        pytest.param(
            {"kind": "parameter_server", "servers": 2, "staleness": 2},
            2,
            {10: "server 1", 40: "worker 1", 70: "worker 0"},
            id="parameter server",
        ),
        pytest.param(
            {"kind": "diloco", "every": 4, "servers": 2, "quorum": 1, "grace_s": 0.2, "outer_momentum": 0.5},
            3,
            {15: "worker 1", 35: "server 1", 60: "worker 0"},
            id="without a barrier",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            {"kind": f"{__file__}:MeanConfig"},
            3,
            {20: "worker 1", 60: "worker 0"},
            id="a user's own",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_run_goes_on_when_a_server_a_worker_and_the_chief_are_killed(
    tmp_path: Path, sync: dict[str, Any], workers: int, kills: dict[int, str]
) -> None:
    processes = Processes()
    log = KillingLog(processes, kills)
    spec = spec_of(sync=sync, workers=workers, batch_size=16 * workers)
    outcome = fit_replicas(spec, "run", tmp_path, log, lambda: False, processes.start)
    assert outcome.reason == "steps"
    assert outcome.steps >= 120
    assert outcome.metrics["loss"] < 0.7  # log(3) = 1.1 is chance
    assert outcome.weights.is_file()
    assert processes.num_started == workers + sync.get("servers", 0) + len(kills)
    assert [details["index"] for details in log.find("server_lost")] == [1] * ("servers" in sync)
    assert sorted(details["index"] for details in log.find("worker_lost")) == [0, 1]
    lost = [before - after for before, after in pairwise(log.steps)]
    assert max(lost) < 4, "the chief goes back to its newest exchange, and no further"
    if spec.sync.kind == "parameter_server":
        assert log.steps == sorted(log.steps)  # the run never went back
        [counted] = log.find("staleness")
        assert counted["updates"] >= 2 * 120
        # τ counts the updates of others between a pull and its update: a bound of 2 steps lets 2 workers be 2 * 2
        # apart, and one more while the push is under way.
        assert max(map(int, counted["counts"])) <= 5
        assert 0 <= counted["lost"] < counted["updates"]


def test_a_server_that_is_lost_with_its_disk_ends_the_attempt_and_the_next_has_the_checkpoint(tmp_path: Path) -> None:
    class OnOtherHosts(Processes):
        """Each server's state is on the disk of its host."""

        def start(self, name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> ForkedProcess:
            for state in tmp_path.glob(f"{name.replace(' ', '-')}-*.safetensors"):
                state.unlink()
            return super().start(name, target, arguments)

    spec = spec_of(checkpoint={"every_steps": 10}, stop={"steps": 30})
    processes = OnOtherHosts()
    with pytest.raises(RankLost, match="server 1: server 1 has died, and its state is lost"):
        fit_replicas(spec, "run", tmp_path, KillingLog(processes, {20: "server 1"}), lambda: False, processes.start)
    log = KillingLog(processes, {})
    outcome = fit_replicas(spec, "run", tmp_path, log, lambda: False, processes.start)
    assert 30 <= outcome.steps <= 32  # the chief sees the steps of others, at most the staleness ahead
    [restored] = log.find("restored")
    assert restored["step"] >= 10


@pytest.mark.parametrize(("task", "process"), [("Raising", "worker"), ("RaisingStep", "server")])
def test_an_error_of_the_task_ends_the_run_with_its_cause_and_its_place(
    tmp_path: Path, task: str, process: str
) -> None:
    processes = Processes()
    spec = spec_of(task=f"{__file__}:{task}")
    with pytest.raises(TrainError, match=rf"^{process} [01]: LookupError: no such class\n") as raised:
        fit_replicas(spec, "run", tmp_path, KillingLog(processes, {}), lambda: False, processes.start)
    assert f'File "{__file__}"' in str(raised.value)
    assert processes.num_started == 4  # it would recur: none is replaced


@pytest.mark.parametrize(
    ("changes", "workers", "tolerance"),
    [
        pytest.param({"sync": {"kind": "parameter_server"}}, (2, 4), 1e-4, id="parameter server"),
        pytest.param({"sync": "all_reduce", "clip_norm": 0.5, "average": 0.9}, ([2, 2], [2, 2]), 1e-4, id="elastic"),
        pytest.param(
            {
                "sync": {"kind": "diloco", "every": 3},
                "optimizer": {"name": "sgd", "momentum": 0.0, "learning_rate": 0.05},  # no worker has state of its own
            },
            (2, 2),
            1e-5,
            id="outer momentum",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_resumed_run_that_waits_for_all_is_that_of_one_process_or_one_that_was_not_ended(
    tmp_path: Path, changes: dict[str, Any], workers: tuple[Any, Any], tolerance: float
) -> None:
    """The second half has another number of servers, and of workers where they have no state."""
    has_servers, is_local = isinstance(changes["sync"], dict), "optimizer" in changes

    def train(name: str, steps: int, workers: Any, servers: int = 1) -> dict[str, Tensor]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        own = {**changes, "sync": {**changes["sync"], "servers": servers}} if has_servers else changes
        if workers == 1:
            own = {**own, "sync": "all_reduce"}
        spec = spec_of(**{"stop": {"steps": steps}, "args": {"dropout": 0.0}, "workers": workers, **own})
        if workers == 1:
            outcome = testing.train(make_task(spec.task, spec.args), home=folder, spec=spec).result
        else:
            outcome = fit_replicas(spec, "run", folder, KillingLog(Processes(), {}), lambda: False)
        assert outcome.steps == steps
        assert outcome.weights is not None
        return safetensors.torch.load_file(outcome.weights)

    expected = train("at once", 12, workers[0] if is_local else 1)
    train("resumed", 6, workers[0])
    resumed = train("resumed", 12, workers[1], servers=3)
    torch.testing.assert_close(resumed, expected, rtol=tolerance, atol=1e-5)


def find_saved_steps(folder: Path) -> list[int]:
    """Of the complete checkpoints of a run."""
    return [int(path.parent.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*/manifest.json")]


@pytest.mark.soak
def test_a_run_whose_controller_is_killed_leaves_no_process_and_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that has the controller can end none of the others, nor remove the folder of their sockets."""
    words = [sys.executable, "-m", "shoal.train", f"task={TOY}", "args.step_s=0.02", "workers=2", "batch_size=32"]
    words += ["sync.kind=parameter_server", "sync.servers=2", "log_every_steps=1", "stop.steps=100000", "threads=1"]
    words += ["checkpoint.every_steps=20"]
    short = Path(tempfile.gettempdir(), f"shoal-test-{os.getpid()}")  # a socket's path has at most 107 characters
    short.mkdir()
    home = {**os.environ, "SHOAL_HOME": str(tmp_path), "TMPDIR": str(short), "PYTHONUNBUFFERED": "1"}
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    with subprocess.Popen(words, env=home, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        next(started.stdout)  # the first line about a step
        below = psutil.Process(started.pid).children(recursive=True)
        assert len(below) >= 4
        [run] = shoal.runs.list_runs()
        saved = wait_for(lambda: max(find_saved_steps(run.folder), default=0), what="checkpoint")
        started.kill()
    _, alive = psutil.wait_procs(below, timeout=20.0)
    assert alive == []
    again = [sys.executable, "-m", "shoal.train", f"resume={run.id}", f"stop.steps={saved + 60}"]
    done = subprocess.run(again, env=home, capture_output=True, text=True, check=False, timeout=600)
    shutil.rmtree(short)
    assert done.returncode == 0, done.stderr
    events = run.last_events()
    assert saved <= events["restored"]["step"] <= saved + 40
    assert events["stopped"]["step"] >= saved + 60


# -- elastic: replacements have the weights of the survivors


class DigestCallback(Callback):
    """Notes step and weights in a file of this process."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"digests of {multiprocessing.current_process().name}, {os.getpid()}"

    def on_step(self, state: TrainingState) -> None:
        digest = hashlib.sha256()
        for each in state.model[0].state_dict().values():
            digest.update(each.numpy().tobytes())
        with self._file.open("a") as file:
            file.write(f"{state.step} {digest.hexdigest()}\n")


class Digested(Toy):
    def __init__(self, *, folder: str, **changes: Any) -> None:
        super().__init__(dropout=0.0, **changes)
        self._folder = folder

    def callbacks(self) -> list[Callback]:
        return [DigestCallback(Path(self._folder))]


def test_survivors_and_replacements_have_equal_weights_when_a_worker_and_the_chief_are_killed(tmp_path: Path) -> None:
    """The run waits for its second worker, so each step is taken by two."""
    task = {"task": f"{__file__}:Digested", "args": {"folder": str(tmp_path), "step_s": 0.02}}
    processes = Processes()
    log = KillingLog(processes, {15: "worker 1", 35: "worker 0"})
    spec = spec_of(**task, sync="all_reduce", workers=[2, 2], stop={"steps": 60})
    outcome = fit_replicas(spec, "run", tmp_path, log, lambda: False, processes.start)
    assert outcome.reason == "steps"
    assert [details["index"] for details in log.find("worker_lost")] == [1, 0]
    assert log.find("elastic") == [{"healed": 3, "restarts": 0}]
    digests: dict[int, list[str]] = defaultdict(list)
    for file in tmp_path.glob("digests of *"):
        for step, digest in map(str.split, file.read_text().splitlines()):
            digests[int(step)].append(digest)
    assert sorted(digests) == list(range(1, 61))  # no step was repeated or left out
    assert all(len(set(each)) == 1 for each in digests.values())
    assert sum(len(each) == 2 for each in digests.values()) > 30
