"""Training without Ray as a user starts it: `python -m shoal.train`, alone and under torchrun, to the end and back."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal.runs
from programs import RanksFailed, run_ranks
from shoal.errors import RunError
from shoal.parallel import World
from shoal.runs import Run, Status
from shoal.testing.run import TaskRun, train
from shoal.train.__main__ import main
from shoal.train.launch import local as alone
from shoal.train.launch.local import fit_locally
from shoal.train.launch.training_run import shutdown_event
from shoal.train.spec import TrainSpec
from train_task import Toy
from training.toy_run import losses_of, train_rank
from waiting import wait_for

TASK = Path(__file__).parents[1] / "train_task.py"
STEPS = 24
WORDS = [
    *(f"task={TASK}:Toy", "batch_size=32", "threads=1", "log_every_steps=1", "checkpoint.every_steps=3"),
    *("optimizer.learning_rate=0.01", f"stop.steps={STEPS}"),
]


def program(*words: str, ranks: int = 1, options: Sequence[str] = ()) -> subprocess.Popen[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options]
    return subprocess.Popen(
        [sys.executable, *(torchrun if ranks > 1 else []), "-m", "shoal.train", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a terminal of its own: what Ctrl-C reaches
    )


def newest() -> Run | None:
    try:
        return shoal.runs.load("latest")
    except RunError:
        return None


def has_come_to(step: int) -> bool:
    run = newest()
    return run is not None and run.latest().get("train/step", 0) >= step


def interrupt(running: subprocess.Popen[str]) -> str:
    """Ctrl-C, as a terminal gives it: to every process of the group. Returns what was said."""
    os.killpg(running.pid, signal.SIGINT)
    said, _ = running.communicate(timeout=600)
    return said


def test_alone_to_the_end_with_ctrl_c_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    undisturbed = shoal.runs.load(fit_locally(TrainSpec().override(WORDS)).run_id)
    running = program(*WORDS, "args.step_s=0.1")
    wait_for(lambda: newest() != undisturbed and has_come_to(2), what="the second step")
    said = interrupt(running)
    stopped = shoal.runs.load("latest")
    assert stopped.id != undisturbed.id
    assert running.returncode == 130
    assert "Traceback" not in said
    assert f"Go on with: python -m shoal.train resume={stopped.id}" in said
    assert stopped.status is Status.STOPPED
    assert stopped.models().empty  # what was interrupted is not registered
    at = max(losses_of(stopped))
    assert main([f"resume={stopped.id}", "args.step_s=0"]) == 0
    assert f"run {stopped.id}: {STEPS} steps" in capsys.readouterr().out
    resumed = shoal.runs.load(stopped.id)
    assert resumed.status is Status.FINISHED
    assert resumed.last_events()["restored"]["step"] == at
    assert losses_of(resumed) == losses_of(undisturbed)  # to the bit


SCRIPT = """
import os, signal, shoal
from train_task import Toy
from training.toy_run import train_rank

class Stopped(Toy):
    number, steps = 0, 0

    def loss(self, outputs, batch):
        Stopped.steps += 1
        if Stopped.steps == 4 and Stopped.number:
            os.kill(os.getpid(), Stopped.number)
        return super().loss(outputs, batch)

def kill_late(line):
    if "registered" in line:
        os.kill(os.getpid(), signal.SIGTERM)

def fit(number, say=None, steps=2000, **fields):
    Stopped.number, Stopped.steps = number, 0
    return shoal.fit(Stopped, name="stopped", stop={"steps": steps}, batch_size=32, threads=1, say=say, **fields)

if __name__ == "__main__":
    try:  # as a notebook, which goes on
        fit(signal.SIGINT)
    except KeyboardInterrupt as interrupt:
        print(interrupt, "/", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: print("own handler", number))
    result = fit(signal.SIGTERM)
    print(result.is_interrupted, result.model)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        fit(0, kill_late, steps=4)  # the run has ended, and the program is to end all the same
    except SystemExit as end:
        print(end, shoal.Registry().get("stopped").ref)
    fit(signal.SIGTERM, print, resume=result.run_id)
    print("served the older version")
"""


def test_a_signal_saves_and_then_ends_the_program_that_called_fit(tmp_path: Path) -> None:
    (tmp_path / "search.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TASK.parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, "search.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("Go on with: the same call, and resume=")
    assert first.endswith(" / True")
    assert rest[:3] == ["own handler 15", "True ", "143 stopped@1"]
    head, run_id, _ = rest[-1].split('"')  # nothing of the program followed
    assert head == "Go on with: the same call, and resume="
    again = shoal.runs.load(run_id)
    assert again.last_events()["restored"]["step"] > 0  # of the handler's interruption
    assert [each.status for each in shoal.runs.list_runs()].count(Status.STOPPED) == 2


@pytest.mark.soak
def test_under_torchrun_ctrl_c_saves_once_and_a_killed_rank_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # torchrun leaves a folder there
    words = [*WORDS, "parallel=ddp", f"args.notes={tmp_path}"]
    running = program(*words, "args.step_s=0.1", ranks=2)
    wait_for(lambda: has_come_to(2), what="the second step")
    said = interrupt(running)
    stopped = shoal.runs.load("latest")
    assert stopped.status is Status.STOPPED, said
    assert said.count(f"Go on with: torchrun --nproc-per-node 2 -m shoal.train resume={stopped.id}") == 1, said
    at = max(losses_of(stopped))

    fault = ["args.fault=kill", "args.fault_rank=1", f"args.fault_step={at + 7}"]
    again = program(
        f"resume={stopped.id}", "args.step_s=0", *fault, ranks=2, options=["--max-restarts=1", "--monitor-interval=0.1"]
    )
    said, _ = again.communicate(timeout=600)
    assert again.returncode == 0, said
    resumed = shoal.runs.load("latest")
    assert (resumed.id, resumed.status) == (stopped.id, Status.FINISHED)
    assert resumed.incarnation == 3
    samples = [json.loads(line) for line in (tmp_path / "samples-0.jsonl").read_text().splitlines()]
    assert len(samples) > STEPS  # the steps since the last checkpoint were done again
    undisturbed = run_ranks(train_rank, 2, tmp_path / "undisturbed", TrainSpec().override([*WORDS, "workers=2"]))
    assert losses_of(resumed) == undisturbed[0]  # to the bit: the same number of ranks adds in the same order


@pytest.mark.soak
def test_ranks_that_are_started_again_go_on_with_no_run_of_another_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In containers host name and process id are the same again and again."""

    def run_of(*words: str, restarts: int) -> str:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        return fit_locally(TrainSpec().override([*WORDS, *words]), registers=False).run_id

    def fail(folder: Path) -> str:
        folder.mkdir()
        with pytest.raises(ValueError, match="a fault of the user's own"):
            run_of(f"args.notes={folder}", "args.fault=raise", "args.fault_step=5", restarts=0)
        return shoal.runs.load("latest").id

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    finished = run_of(restarts=0)
    assert run_of(restarts=1) != finished
    failed = fail(tmp_path / "one")
    assert run_of(restarts=1) == failed
    failed = fail(tmp_path / "other")
    monkeypatch.setattr(alone, "_get_launch_time", lambda: time.time() + 3600.0)
    assert run_of(restarts=1) != failed


def test_under_torchrun_the_rank_that_is_wrong_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    fault = [f"args.notes={tmp_path}", "args.fault=skip", "args.fault_rank=1", "args.fault_step=2"]
    running = program(*WORDS, "parallel=ddp", *fault, ranks=2)
    said, _ = running.communicate(timeout=600)
    assert running.returncode == 1
    assert said.count("[rank 1] error: parallel.dynamic = False: 0.weight had a gradient at first") == 1, said


@pytest.mark.parametrize(
    ("environment", "prefix"), [({}, ""), ({"RANK": "1", "WORLD_SIZE": "2"}, "[rank 1] ")], ids=str
)
def test_words_that_are_wrong_are_answered_by_every_rank(
    environment: dict[str, str], prefix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that ends without a word may take the others along before they have said theirs."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main([*WORDS, "batch_sise=32"]) == 1
    assert capsys.readouterr().err.startswith(f"{prefix}error: batch_sise")


class Wide(Toy):
    """Activations of 1 MB for each sample."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 250_000), nn.Tanh(), nn.Linear(250_000, 3))

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {}


def starve(world: World, folder: Path) -> None:
    """The program of a process that may use little more memory than it has."""
    from shoal.train.loop.trainer import Trainer

    spec = TrainSpec.parse({"task": "Wide", "batch_size": 128, "stop": {"steps": 2}, "optimizer": {"name": "sgd"}})
    trainer = Trainer(spec, Wide(), world, folder)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 150_000_000
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    trainer.run()


def test_out_of_memory_says_what_would_have_fitted(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"OutOfMemory: step 1: .* 128 samples at a time .* would have fitted"):
        run_ranks(starve, 1, tmp_path)


def fill_the_disk(world: World, folder: Path, asynchronous: bool) -> TaskRun:
    """The program of a process that may write no file as large as a checkpoint, for some steps."""

    class Limited(Toy):
        steps = 0

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            if torch.is_grad_enabled():
                self.steps += 1
                most = 1000 if 5 < self.steps <= 11 else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
            return super().loss(outputs, batch)

    spec = TrainSpec.parse(
        {
            "task": "Limited",
            "batch_size": 32,
            "stop": {"steps": 16},
            "checkpoint": {"every_steps": 3, "asynchronous": asynchronous, "keep": 10},
        }
    )
    return train(Limited(), home=folder, spec=spec, world=world)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_does_not_end_a_run(tmp_path: Path, asynchronous: bool) -> None:
    [run] = run_ranks(fill_the_disk, 1, tmp_path, asynchronous)
    assert run.result.steps == 16
    failed = [details["error"] for kind, details in run.log.events if kind == "checkpoint_failed"]
    kept = {path.name for path in (tmp_path / "checkpoints").glob("step-*")}
    assert any("step 6" in error for error in failed)
    assert "step-000000006" not in kept
    assert {"step-000000012", "step-000000015", "step-000000016"} <= kept
    if not asynchronous:  # else a save may still be under way when the limit comes, or goes
        assert ["step 6" in failed[0], "step 9" in failed[1], len(failed)] == [True, True, 2]
        assert "step-000000003" in kept
        assert "step-000000009" not in kept


def test_a_signal_that_the_program_ignores_does_not_end_its_run() -> None:
    """As Ctrl-C at a terminal, for a program that a script of the shell has started with `&`."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with shutdown_event() as asked:
            signal.raise_signal(signal.SIGINT)
            assert not asked.is_set()
            signal.raise_signal(signal.SIGTERM)
            assert asked.number == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
