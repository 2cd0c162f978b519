"""Training as a user does it: from the shell to an endpoint, through Ctrl-C, the death of everything, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import shoal.runs
from programs import run_ranks
from ray_data_task import NUM_SAMPLES
from shoal.errors import RunError
from shoal.runs import Run, Status
from shoal.train.launch.overrides import spec_from_overrides
from shoal_program import END_S, ROOT, commands_with, shoal_program
from training.toy_run import losses_of, train_rank
from waiting import wait_for, wait_until_none

if TYPE_CHECKING:
    from shoal.cluster.embedded_cluster import EmbeddedCluster

STEPS = 16
# A run that starts its own cluster takes its first step after 30 s, or after 140 where three start at a time.
STATE_S = 900.0
WORDS = [
    *("task=tests/train_task.py:Toy", "parallel=ddp", "workers=2", "batch_size=32", "threads=1"),
    *(f"stop.steps={STEPS}", "log_every_steps=1", "checkpoint.every_steps=3", "optimizer.learning_rate=0.01"),
]
pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each program."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def newest() -> Run | None:
    try:
        return shoal.runs.load("latest")
    except RunError:
        return None


def at_step(step: int, incarnation: int = 1) -> Callable[[], bool]:
    """Whether the newest run, in this life of it, has done so many steps."""

    def found() -> bool:
        run = newest()
        return (
            run is not None
            and run.incarnation == incarnation
            and run.latest(since_resumed=True).get("train/step", 0) >= step
        )

    return found


def assert_nothing_stays(home: Path) -> None:
    """No process that was started with this home, and no temporary file of one."""
    wait_until_none(lambda: commands_with("SHOAL_HOME", str(home)), END_S, f"processes of {home}")
    assert temporary_files(home) == []


def temporary_files(home: Path) -> list[str]:
    """But for the cache that torch makes for itself, in every program that trains."""
    return [path.name for path in (home.parent / "tmp").iterdir() if not path.name.startswith("torchinductor_")]


@pytest.mark.soak
def test_a_run_outlives_ctrl_c_and_the_death_of_everything(
    cluster: EmbeddedCluster, own_home: Path, tmp_path: Path
) -> None:
    with shoal_program("run", "train", *WORDS, f"args.notes={tmp_path}", "args.step_s=0.3") as program:
        program.wait_until(at_step(2), "the second step", STATE_S)
        program.interrupt()
        assert program.wait() == 130
        assert "Traceback" not in program.said
        assert_nothing_stays(own_home)
        stopped = shoal.runs.load("latest")
        assert stopped.status is Status.STOPPED
        assert f"Go on with: shoal run train resume={stopped.id}" in program.said
    assert stopped.last_events()["stopped"]["reason"] == "interrupted"
    at = stopped.last_events()["stopped"]["step"]
    assert (stopped.folder / "checkpoints" / f"step-{at:09}").is_dir()

    fault = ["args.fault=wait", f"args.fault_step={at + 4}"]  # a place to be killed at
    with shoal_program("run", "train", f"resume={stopped.id}", "args.step_s=0", *fault) as program:
        program.wait_until((tmp_path / "failed").exists, "the step to wait at", STATE_S)
        program.wait_until(at_step(at + 3, incarnation=2), "the steps before it in the record", STATE_S)
        program.process.kill()
        program.wait()
        assert_nothing_stays(own_home)
    # Lost; unless the driver heard from the cluster, as that ended, and had the time to say so.
    wait_for(
        lambda: shoal.runs.load(stopped.id).status is not Status.RUNNING, END_S, "the end of the run in its record"
    )

    run_id = _go_on_here(stopped.id)
    finished = shoal.runs.load(run_id)
    assert (finished.id, finished.status, finished.incarnation) == (stopped.id, Status.FINISHED, 3)
    assert at <= finished.last_events(since_resumed=True)["restored"]["step"] <= at + 4
    spec = spec_from_overrides([word for word in WORDS if not word.startswith("task=")])
    undisturbed = run_ranks(train_rank, 2, tmp_path / "undisturbed", spec)[0]
    assert losses_of(finished) == undisturbed  # to the bit: two ranks, in three lives


def _go_on_here(run_id: str) -> str:
    """As `shoal run train resume=...` does it, on the cluster that is up already."""
    from shoal.flows.training import run_training

    return run_training(spec_from_overrides([f"resume={run_id}", "args.fault="]), "train")


@pytest.mark.soak
def test_a_dataset_of_ray_data_trains_and_is_read_once_an_epoch(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    from shoal.flows.training import run_training

    task = f"task={ROOT / 'tests' / 'ray_data_task.py'}:Lines"
    words = ["workers=1", "batch_size=16", "stop.epochs=2", "optimizer.learning_rate=0.1", "log_every_steps=1"]
    run = shoal.runs.load(
        run_training(spec_from_overrides([task, *words, f"args.notes={tmp_path / 'notes'}"]), "train")
    )
    taken = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    per_epoch = NUM_SAMPLES // 16  # what follows after two epochs is the prediction of the cost, made at the end
    for epoch in (taken[:per_epoch], taken[per_epoch : 2 * per_epoch]):
        assert sorted(index for step in epoch for index in step) == list(range(NUM_SAMPLES))
    losses = losses_of(run)
    assert losses[max(losses)] < losses[1]
