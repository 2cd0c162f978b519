"""How long 10 MB of weights take from publication to 64 actors, and what publishing costs the learner.

    python -m benchmarks.publish_latency [--runs N] [--quick]

64 external processes in the loop of `shoal.actor`, connected to a run without Ray. A learner that does all its work and
changes nothing publishes at most once in two seconds. The latency of one actor is from the moment at which the learner
publishes to the moment at which it acts with the version, or a newer one; the median is over actors and versions. Each
actor makes 20 steps a second and looks for weights at every step: a step of this network takes 0.3 ms or more, so all
actors together leave most of two cores free.

The learner's step is its time for a batch, publication included, beside that of a run which publishes once.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.children import scratch
from benchmarks.ours.rl import actors_of, run_of
from benchmarks.result import Row, compare, options, write

NUM_ACTORS, QUICK_ACTORS, STEPS_PER_S = 64, 8, 20
LATENCY_BAR_MS, STEP_BAR = 150.0, 1.02
SETTLE_S, INTERVAL_S, NEVER_S = 5.0, 2.0, 1e6
SPEC: dict[str, Any] = {"hidden": [1118, 1118], "segment_length": 16, "gateway": {"queue_capacity": 128}}  # 10.0 MB


def measure(folder: Path, num_actors: int, interval_s: float, seconds: float) -> tuple[list[list[float]], list[float]]:
    """For each version published meanwhile, the milliseconds until each actor had it; and the seconds of each batch."""
    spec = SPEC | {"learner": {"batch_steps": 4 * num_actors, "publish_interval_s": interval_s}}
    words = ["--steps-per-s", str(STEPS_PER_S), "--tell-weights"]
    with (
        run_of("local", folder, still=True, spec=spec) as (run, address),
        actors_of(folder, num_actors, ["--connect", address, *words]) as actors,
    ):
        time.sleep(SETTLE_S)
        run.ask(do="published"), run.ask(do="steps")
        time.sleep(seconds)
        published, step_s = run.ask(do="published")["versions"], run.ask(do="steps")["seconds"]
        time.sleep(2.0)
        applied = [[(said["version"], said["at_s"]) for said in actor.heard()] for actor in actors]
    latencies = [
        [1e3 * (min(at_s for newer, at_s in actor if newer >= version) - published_at) for actor in applied]
        for version, published_at in published
    ]
    return latencies, step_s


def rows_of(latencies: list[list[float]], step_s: list[float], quiet_step_s: list[float], num_actors: int) -> list[Row]:
    each = [one for version in latencies for one in version]
    last = [max(version) for version in latencies]
    title = f"10 MB of weights, published until applied by {num_actors} actors"
    note = f"{STEPS_PER_S} steps/s of an actor; {len(latencies)} versions"
    return [
        compare(f"{title}, median of actors", "ms", "lower", each, bar=LATENCY_BAR_MS, bar_kind="value", note=note),
        compare(f"{title}, the last of them", "ms", "lower", last, note=note),
        compare(
            f"learner's step, 10 MB published to {num_actors} actors every {INTERVAL_S:g} s", "ms", "lower",
            [1e3 * statistics.fmean(step_s)], [1e3 * statistics.fmean(quiet_step_s)], "nothing published",
            STEP_BAR, "ratio", note=f"means of {len(step_s)} and {len(quiet_step_s)} batches",
        ),
    ]  # fmt: skip


def main() -> None:
    chosen = options(__doc__, runs=3)
    num_actors, seconds = (QUICK_ACTORS, 8.0) if chosen.quick else (NUM_ACTORS, 30.0)
    latencies: list[list[float]] = []
    step_s: list[float] = []
    quiet_step_s: list[float] = []
    with scratch() as folder:
        for index in range(chosen.runs):
            found, seconds_each = measure(folder, num_actors, INTERVAL_S, seconds)
            latencies += found
            step_s += seconds_each
            quiet_step_s += measure(folder, num_actors, NEVER_S, seconds)[1]
            medians = ", ".join(f"{statistics.median(each):.0f}" for each in found)
            print(f"run {index + 1}: medians of versions {medians} ms", flush=True)
    write("publish_latency", rows_of(latencies, step_s, quiet_step_s, num_actors), chosen.results)


if __name__ == "__main__":
    main()
