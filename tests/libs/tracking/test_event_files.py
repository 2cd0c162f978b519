"""TensorBoard shows each step of a run once, and a disk that is full costs the curves alone."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from shoal import runs
from shoal.libs.tracking.event_files import EventFile
from shoal.runs import RunRecorder
from waiting import wait_for


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
