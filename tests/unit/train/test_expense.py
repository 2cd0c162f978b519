"""Time- and cost-to-accuracy from a record's rows."""

from __future__ import annotations

import pandas
import pytest

import shoal.runs
from shoal.train.reporting.time_to_accuracy import (
    TRAINING_S,
    Attempt,
    TargetReached,
    compute_cost,
    find_attempts,
    find_target_reached,
    get_evaluations,
)
from shoal.train.spec import TargetSpec

ROWS = [(10, 5.0, 0.5), (20, 10.0, 0.92), (30, 15.0, 0.88), (40, 20.0, 0.95)]


def test_money_is_time_times_devices_times_price() -> None:
    assert compute_cost(1800.0, [Attempt(0.0, 4)], 2.5) == pytest.approx(5.0)


def test_each_life_is_paid_for_with_its_own_workers() -> None:
    lives = [Attempt(0.0, 4), Attempt(1800.0, 1)]
    assert compute_cost(900.0, lives, 2.0) == pytest.approx(2.0)
    assert compute_cost(3600.0, lives, 2.0) == pytest.approx(4.0 + 1.0)
    # The third went on from a checkpoint of the first: what the second did is done again, and is not in the seconds.
    again = [Attempt(0.0, 4), Attempt(1800.0, 8), Attempt(900.0, 1)]
    assert compute_cost(1800.0, again, 2.0) == pytest.approx(2.0 + 0.5)


def test_the_lives_of_a_record() -> None:
    with shoal.runs.create("train", "{}", "lives") as recorder:
        recorder.record_event("training", step=0, workers=2, training_s=0.0)
        recorder.record_event("training", step=30, workers=1, training_s=12.5)
    assert find_attempts(shoal.runs.load("lives").events(), 3) == [Attempt(0.0, 2), Attempt(12.5, 1)]
    with shoal.runs.create("train", "{}", "older") as recorder:
        recorder.record_event("training", step=0, workers=2)
        recorder.record_event("training", step=30, workers=1, training_s=12.5)
    assert find_attempts(shoal.runs.load("older").events(), 3) == [Attempt(0.0, 3)]


def test_the_first_evaluation_that_meets_the_target_counts() -> None:
    target = TargetSpec(metric="accuracy", value=0.9)
    assert find_target_reached(ROWS, target, [Attempt(0.0, 2)], 3600.0) == TargetReached(20, 0.92, 10.0, 20.0)
    assert find_target_reached(ROWS, TargetSpec(metric="accuracy", value=0.99)) is None
    falling = [(step, at, 1 - value) for step, at, value in ROWS]
    least = find_target_reached(falling, TargetSpec(metric="loss", value=0.1))
    assert least is not None
    assert least.step == 20


def test_rows_of_a_record_without_the_time_of_evaluation() -> None:
    with shoal.runs.create("train", "{}", "one") as recorder:
        recorder.log(5, {TRAINING_S: 2.0, "train/loss": 1.0})
        recorder.log(10, {"validation/accuracy": 0.5})
        recorder.log(15, {TRAINING_S: 7.0})
        recorder.log(20, {TRAINING_S: 9.0, "validation/accuracy": 0.9})
        recorder.log(25, {"validation/accuracy": 0.95})
    metrics = shoal.runs.load("one").metrics()
    assert get_evaluations(metrics, "validation/accuracy") == [(10, 7.0, 0.5), (20, 9.0, 0.9)]
    assert get_evaluations(metrics, "validation/f1") == []
    assert get_evaluations(pandas.DataFrame({"validation/accuracy": [1.0]}), "validation/accuracy") == []
