"""Kill by name a worker, Ray Train's controller, the mailbox, and let a task fail: where the run goes on, and how."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import shoal.runs
from leftovers import pids_of
from programs import run_ranks
from shoal.runs import Run, Status
from shoal.train.spec import TrainSpec
from training.toy_run import losses_of, train_rank
from waiting import wait_for

if TYPE_CHECKING:
    from shoal.cluster.embedded_cluster import EmbeddedCluster

TASK = f"{Path(__file__).parents[1] / 'train_task.py'}:Toy"
# two epochs of eight steps
SAMPLES = 256
STEPS = 16
SAVED_EVERY = 3
STATE_S = 600.0
pytestmark = pytest.mark.timeout(1500)


def spec_of(notes: Path, **args: Any) -> TrainSpec:
    return TrainSpec.parse(
        {
            "task": TASK,
            "args": {"notes": str(notes), "count": SAMPLES, **args},
            "parallel": "ddp",
            "workers": 2,
            "threads": 1,
            "batch_size": 32,
            "stop": {"steps": STEPS},
            "log_every_steps": 1,
            "optimizer": {"learning_rate": 0.01},
            "checkpoint": {"every_steps": SAVED_EVERY},
            "name": "toy-faults",
        }
    )


class Meanwhile:
    """Runs something in a thread, and fails with it."""

    def __init__(self, what: Callable[[], None]) -> None:
        self._what = what
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._what()
        except Exception as error:  # noqa: BLE001 - raised again by the test
            self._error = error

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *raised: object) -> None:
        if raised[0] is None:
            self._thread.join(STATE_S)
        if self._error is not None:
            raise self._error
        assert raised[0] is not None or not self._thread.is_alive(), "it goes on"


def the_only(cluster: EmbeddedCluster, word: str) -> int:
    """The cluster's process with `word`, once that of the test before has ended."""
    return wait_for(lambda: pids[0] if len(pids := pids_of(cluster, word)) == 1 else 0, STATE_S, f"one {word}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of two ranks that nothing disturbs, and that no Ray has started."""
    folder = tmp_path_factory.mktemp("undisturbed")
    losses: dict[int, float] = run_ranks(train_rank, 2, folder, spec_of(folder))[0]
    assert sorted(losses) == list(range(1, STEPS + 1))
    return losses


def lines_of(notes: Path, rank: int) -> list[list[int]]:
    """The samples of each step that this rank took, over all of its lives."""
    return [json.loads(line) for line in (notes / f"samples-{rank}.jsonl").read_text().splitlines()]


def assert_went_on(run: Run, notes: Path, undisturbed: dict[int, float]) -> None:
    """From the newest checkpoint, to the bit, and with every sample of an epoch once in the steps that count."""
    assert run.status is Status.FINISHED
    kinds = run.events()["kind"].tolist()
    assert kinds.count("workers_lost") == 1
    resumed_at = run.last_events()["restored"]["step"]
    assert resumed_at in (SAVED_EVERY, 2 * SAVED_EVERY)  # the newest one that was whole
    # The same number of ranks adds in the same order: not a tolerance, equality.
    assert losses_of(run) == undisturbed
    kept = []
    for rank in range(2):
        lines = lines_of(notes, rank)
        later = STEPS - resumed_at  # the second life's
        first, second = lines[:-later], lines[-later:]
        assert first[resumed_at:] == second[: len(first) - resumed_at]  # what was done again was the same
        kept.append(first[:resumed_at] + second)
    for epoch in (0, 1):
        given = [index for each in kept for step in each[epoch * 8 : epoch * 8 + 8] for index in step]
        assert sorted(given) == list(range(SAMPLES))


def test_a_killed_worker_is_replaced_and_the_run_goes_on_to_the_bit(
    cluster: EmbeddedCluster, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    from shoal.flows.training import run_training

    run_id = run_training(spec_of(tmp_path, fault="kill", fault_step=7, fault_rank=1), "train")
    assert_went_on(shoal.runs.load(run_id), tmp_path, undisturbed)


@pytest.mark.soak
def test_the_death_of_ray_trains_controller_is_a_loss_of_workers(
    cluster: EmbeddedCluster, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    from shoal.cluster.capacity import wait_for_resource
    from shoal.flows.training import run_training

    def kill() -> None:
        wait_for(lambda: (tmp_path / "failed").exists(), STATE_S, "the step to wait at")
        os.kill(the_only(cluster, "TrainController"), signal.SIGKILL)

    free = wait_for_resource("CPU", 8.0, STATE_S)
    with Meanwhile(kill):
        run_id = run_training(spec_of(tmp_path, fault="wait", fault_step=7), "train")
    assert_went_on(shoal.runs.load(run_id), tmp_path, undisturbed)
    assert wait_for_resource("CPU", free, STATE_S) == free, "the place of the first group is given up"
