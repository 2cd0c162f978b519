"""How long new weights take: from publication to every actor, and from publication to the endpoint's first answer.

    python -m benchmarks.weights [--runs N] [--quick]

Actors: 16 external processes in the loop of `shoal.actor`, connected to a run whose learner publishes 1 MB about once a
second, without Ray and with gateway, learner and store as Ray workers. From the moment at which the learner publishes
to the moment at which the last of the 16 acts with the version. Each actor makes 60 steps a second, as a game does, and
looks for weights at every step: 16 that run as fast as they can would measure how this machine shares its cores.

Endpoint: 200 requests a second in an open loop; from the moment before 1 MB of weights is serialised to the first
answer of the new version. Every request must be answered.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from benchmarks.children import pause_until, scratch
from benchmarks.ours.rl import actors_of, run_of
from benchmarks.result import Row, compare, options, write
from benchmarks.serving.drive import Drive, Outcome
from benchmarks.serving.servers import OURS, Server, server_of

NUM_ACTORS = 16
STEPS_PER_S = 60
SETTLE_S = 3.0
SPEC = {
    "hidden": [352, 352],  # policy and value: 1.0 MB of float32
    "learner": {"batch_steps": NUM_ACTORS * STEPS_PER_S},  # an update, and so a version, about once a second
}
REQUESTS_PER_S = 200
PUBLISH_EVERY_S = 0.5
ACTORS_BAR_MS, ENDPOINT_BAR_MS = 50.0, 250.0
ENGINES = {"ray": "Ray", "local": "one process, no Ray"}


def to_actors(engine: str, folder: Path, seconds: float) -> list[float]:
    """For each version published meanwhile, the milliseconds until all actors had applied it or a newer one."""
    words = ["--steps-per-s", str(STEPS_PER_S), "--tell-weights"]
    with (
        run_of(engine, folder, balancing=True, spec=SPEC) as (run, address),
        actors_of(folder, NUM_ACTORS, ["--connect", address, *words]) as actors,
    ):
        time.sleep(SETTLE_S)
        run.ask(do="published")
        time.sleep(seconds)
        published = run.ask(do="published")["versions"]
        time.sleep(2.0)
        applied = [[(said["version"], said["at_s"]) for said in actor.heard()] for actor in actors]
    return [1e3 * (arrival(applied, version) - published_at) for version, published_at in published]


def arrival(applied: list[list[tuple[int, float]]], version: int) -> float:
    """When the last actor had `version` or a newer one."""
    return max(min(at_s for newer, at_s in actor if newer >= version) for actor in applied)


def to_endpoint(server: Server, folder: Path, num_versions: int) -> tuple[list[float], list[str]]:
    """For each publication the milliseconds until it answered; and what became of requests that failed."""
    seconds = PUBLISH_EVERY_S * (num_versions + 4)
    with Drive(folder, server.target(), rate=float(REQUESTS_PER_S), seconds=seconds) as drive:
        begin_s = drive.begun() + 2 * PUBLISH_EVERY_S
        published = []
        for index in range(num_versions):
            pause_until(begin_s + index * PUBLISH_EVERY_S)
            published.append(server.child.ask(do="publish"))
        outcome = drive.outcome()
    values = [1e3 * (first_answer(outcome, one["version"]) - one["published_s"]) for one in published]
    return values, [f"{kind}: {count}" for kind, count in outcome.failures.items()]


def first_answer(outcome: Outcome, version: int) -> float:
    """When `version` or a newer one answered for the first time, in seconds of time.monotonic()."""
    return float(outcome.done_s[outcome.versions >= version].min())


def rows_of(actors_ms: dict[str, list[float]], endpoint_ms: list[float], failures: list[str]) -> list[Row]:
    """Latencies have a bar for their median; failures are counted over all runs."""
    rows = [
        compare(
            f"1 MB of weights, published until applied by all {NUM_ACTORS} actors ({ENGINES[engine]})",
            "ms", "lower", values, bar=ACTORS_BAR_MS, bar_kind="value",
            note=f"actors at {STEPS_PER_S} steps/s look for weights at every step",
        )
        for engine, values in actors_ms.items()
    ]  # fmt: skip
    first = compare(
        "1 MB of weights, published until the endpoint answers with it", "ms", "lower", endpoint_ms,
        bar=ENDPOINT_BAR_MS, bar_kind="value", note=f"under {REQUESTS_PER_S} requests/s in an open loop",
    )  # fmt: skip
    failed = compare(
        f"failed requests while {len(endpoint_ms)} versions were swapped in", "requests", "lower", [len(failures)],
        bar=0.0, bar_kind="value", note=json.dumps(failures[:3]) if failures else "",
    )  # fmt: skip
    return [*rows, first, failed]


def main() -> None:
    chosen = options(__doc__, runs=2)
    seconds, num_versions = (5.0, 5) if chosen.quick else (20.0, 20)
    actors_ms: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    endpoint_ms: list[float] = []
    failures: list[str] = []
    with scratch() as folder:
        for index in range(chosen.runs):
            for engine in ENGINES:
                values = to_actors(engine, folder, seconds)
                actors_ms[engine] += values
                print(f"run {index + 1}, actors, {engine}: {', '.join(f'{one:.0f}' for one in values)} ms", flush=True)
            with server_of(OURS, "megabyte", folder) as server:
                values, failed = to_endpoint(server, folder, num_versions)
            endpoint_ms += values
            failures += failed
            print(f"run {index + 1}, endpoint: {', '.join(f'{one:.0f}' for one in values)} ms, {len(failed)} failed")
    write("weights", rows_of(actors_ms, endpoint_ms, failures), chosen.results)


if __name__ == "__main__":
    main()
