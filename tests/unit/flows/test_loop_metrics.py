"""The curves of the loop: rates between counts, and actors that come and go."""

import itertools
import math
from typing import Any

from shoal import runs
from shoal.flows.rl_metrics import MAX_LAG_METRICS, ActorLearnerMetrics, HistorySampler, Rate, select_lags


def gateway(counted_at: float, steps: int, *actors: str) -> dict[str, Any]:
    return {
        "mean_return": 20.0,
        "episode_spread": {"length": 7.5, "success_rate": 0.25},
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
    assert rate.update(10.0, 1000) == 0.0
    assert rate.update(12.0, 1500) == 250.0
    assert rate.update(12.0, 1500) == 0.0  # nobody has counted since
    assert rate.update(16.0, 2500) == 250.0
    assert rate.update(17.0, 5) == 0.0  # it counts anew
    assert rate.update(18.0, 105) == 100.0


def test_stats_of_before_are_no_steps_and_those_after_them_no_burst() -> None:
    metrics = ActorLearnerMetrics()
    found = [
        metrics.compute(gateway(at, steps), {}, 0.0, at)["steps/per_s"]
        for at, steps in ((0, 0), (1, 100), (1, 100), (5, 500))
    ]
    assert found == [0.0, 100.0, 0.0, 100.0]


def test_what_is_dropped_is_counted_and_who_has_left_lags_no_more() -> None:
    metrics = ActorLearnerMetrics()
    found = metrics.compute(gateway(1.0, 10, "a", "b"), {"updates": 4, "metrics": {"learner/loss": 0.5}}, 7.0, 1.0)
    assert (found["drops/non_finite"], found["segments/dropped"], found["learner/loss"]) == (2.0, 2.0, 0.5)
    assert (found["lag/max"], found["lag/mean"], found["actors/connected"]) == (1.0, 1.0, 2.0)
    found = metrics.compute(gateway(2.0, 10, "b"), {}, 8.0, 2.0)
    assert (found["lag/max"], found["endpoint/requests_per_s"]) == (1.0, 1.0)
    assert (found["episode/length"], found["episode/success_rate"]) == (7.5, 0.25)
    assert math.isnan(metrics.compute(gateway(3.0, 10), {}, 8.0, 3.0)["lag/max"])


def test_returns_are_compared_by_the_versions_of_the_settings() -> None:
    by_settings = {version: {"episodes": 5, "mean_return": float(version)} for version in (3, 1, 2)}
    stats = {**gateway(1.0, 10), "settings_version": 3, "by_settings": by_settings}
    found = ActorLearnerMetrics().compute(stats, {}, 0.0, 1.0)
    assert {name: each for name, each in found.items() if name.startswith("settings/")} == {
        "settings/version": 3.0,
        **{f"settings/return_{version}": float(version) for version in (1, 2, 3)},
    }


def test_a_run_with_many_actors_has_as_many_curves_as_one_with_few() -> None:
    metrics = ActorLearnerMetrics()
    with runs.create("job", "", "one") as run:
        seen = []
        for number in range(200):
            stats = gateway(float(number), number, f"actor-{number}", f"actor-{number + 1}")
            run.log(number, metrics.compute(stats, {}, 0.0, float(number)))
            run.log_group(number, "actor_lag", select_lags(stats))
            if number in (0, 199):
                run.flush()
                seen.append((len(runs.load("one").metrics().columns), len(runs.load("one").latest())))
    assert seen[0] == seen[1]
    latest = runs.load("one").latest()
    told = {name: value for name, value in latest.items() if name.startswith("actor_lag/")}
    assert told == {"actor_lag/actor-199": 1.0, "actor_lag/actor-200": 1.0}
    many = gateway(0.0, 0, *(f"actor-{number}" for number in range(200)))
    assert len(select_lags(many)) == MAX_LAG_METRICS


def test_all_of_the_first_hour_is_kept_and_of_a_week_not_much_more() -> None:
    thinning = HistorySampler(began_s=50.0)
    looks = [50.0 + 0.5 * number for number in range(7 * 24 * 7200)]
    kept = [at for at in looks if thinning.should_keep(at)]
    assert kept[:7200] == looks[:7200]
    assert 30_000 < len(kept) < 50_000
    longest_s = max(later - earlier for earlier, later in itertools.pairwise(kept))
    assert longest_s <= 7 * 24 * 3600 / 7200 + 0.5
