"""The curves of the loop: rates between counts, and actors that come and go."""

from __future__ import annotations

import itertools
import math
from typing import Any

from shoal.flows.loop_metrics import LoopMetrics, Rate, Thinning


def gateway(counted_at: float, steps: int, *actors: str) -> dict[str, Any]:
    return {
        "mean_return": 20.0,
        "episodes": 3,
        "steps": steps,
        "counted_at": counted_at,
        "weights_version": 2,
        "queue_depth": 1,
        "actors": [{"actor_id": each, "connected": True, "lag": 1} for each in actors],
        "segments": {"received": 9, "consumed": 6, "queued": 1, "dropped": {"non_finite": 2}},
    }


def test_a_rate_is_that_between_two_counts_whenever_they_are_heard_of() -> None:
    rate = Rate()
    assert rate.at(10.0, 1000) == 0.0
    assert rate.at(12.0, 1500) == 250.0
    assert rate.at(12.0, 1500) == 0.0  # nobody has counted since
    assert rate.at(16.0, 2500) == 250.0
    assert rate.at(17.0, 5) == 0.0  # it counts anew
    assert rate.at(18.0, 105) == 100.0


def test_stats_of_before_are_no_steps_and_those_after_them_no_burst() -> None:
    metrics = LoopMetrics()
    found = [
        metrics.of(gateway(at, steps), {}, 0.0, at)["steps/per_s"]
        for at, steps in ((0, 0), (1, 100), (1, 100), (5, 500))
    ]
    assert found == [0.0, 100.0, 0.0, 100.0]


def test_what_is_dropped_is_counted_and_who_has_left_lags_no_more() -> None:
    metrics = LoopMetrics()
    found = metrics.of(gateway(1.0, 10, "a", "b"), {"updates": 4, "metrics": {"learner/loss": 0.5}}, 7.0, 1.0)
    assert (found["drops/non_finite"], found["segments/dropped"], found["learner/loss"]) == (2.0, 2.0, 0.5)
    assert (found["lag/a"], found["lag/b"]) == (1.0, 1.0)
    found = metrics.of(gateway(2.0, 10, "b"), {}, 8.0, 2.0)
    assert math.isnan(found["lag/a"])
    assert (found["lag/b"], found["endpoint/requests_per_s"]) == (1.0, 1.0)
    assert "lag/a" not in metrics.of(gateway(3.0, 10, "b"), {}, 8.0, 3.0)


def test_all_of_the_first_hour_is_kept_and_of_a_week_not_much_more() -> None:
    thinning = Thinning(began_s=50.0)
    looks = [50.0 + 0.5 * number for number in range(7 * 24 * 7200)]
    kept = [at for at in looks if thinning.keeps(at)]
    assert kept[:7200] == looks[:7200]
    assert 30_000 < len(kept) < 50_000
    longest_s = max(later - earlier for earlier, later in itertools.pairwise(kept))
    assert longest_s <= 7 * 24 * 3600 / 7200 + 0.5
