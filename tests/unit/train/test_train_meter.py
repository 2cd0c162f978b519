"""The shares of time that a report of the Trainer's has."""

from __future__ import annotations

import math

import pytest

from shoal.train.loop.step_reports import ThroughputMeter


def test_what_nobody_can_tell_is_not_reported() -> None:
    """A plan whose waits are the device's says NaN seconds of waiting; that is not all of the time."""
    meter = ThroughputMeter(math.nan, communicated_s=lambda: math.nan)
    meter.count_steps(1, 32)
    found = meter.compute_rates(waited_s=0.0)
    assert "wait/communication" not in found
    assert found["wait/data"] == 0.0


def test_a_share_is_at_most_all_of_the_time() -> None:
    meter = ThroughputMeter(math.nan, communicated_s=lambda: 1e6)
    meter.count_steps(1, 32)
    found = meter.compute_rates(waited_s=1e6)  # a wait that began before the last report
    assert (found["wait/data"], found["wait/communication"]) == (1.0, 1.0)


def test_waits_of_an_evaluation_are_none_of_the_steps() -> None:
    waited = [0.0]
    meter = ThroughputMeter(math.nan, communicated_s=lambda: waited[0])
    meter.count_steps(1, 32)
    with meter.pause():
        waited[0] += 1e6
    assert meter.compute_rates(waited_s=0.0)["wait/communication"] == 0.0


def test_a_step_of_replicas_without_waiting_is_one_of_the_run() -> None:
    meter = ThroughputMeter(math.nan, communicated_s=lambda: math.nan)
    meter.count_steps(4, 4 * 32)
    found = meter.compute_rates(waited_s=0.0)
    assert found["samples/per_s"] * found["step/seconds"] == pytest.approx(32)
