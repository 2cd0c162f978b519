"""A hundred versions of the weights swapped in under 500 requests a second: nothing fails, nothing is mixed, p99 stays.

    python -m benchmarks.serving.swaps [--runs N] [--quick]

Each version's weights write its number into every value of an answer, and every answer is compared with the version
that it names. The same load without swaps, on the same endpoint before and after, is what p99 is compared with.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.children import pause_until, scratch
from benchmarks.result import Row, compare, options, write
from benchmarks.serving.drive import Drive, Outcome, poisson
from benchmarks.serving.servers import OURS, Server, server_of

RATE = 500.0
EVERY_S = 0.15
BAR = 1.2


def with_swaps(server: Server, folder: Path, num_versions: int, seed: int) -> Outcome:
    """The load while `num_versions` are published; every answer is checked."""
    seconds = EVERY_S * (num_versions + 4)
    plan = {"rate": RATE, "seconds": seconds, "warm_up_s": 1.0, "seed": seed, "check": "version"}
    with Drive(folder, server.target(), **plan) as drive:
        begin_s = drive.begun() + 1.0
        for index in range(num_versions):
            pause_until(begin_s + index * EVERY_S)
            server.child.ask(do="publish")
        return drive.outcome()


def measure(folder: Path, num_versions: int, seed: int, found: dict[str, list[float]]) -> None:
    """One run: without, with, without."""
    seconds = EVERY_S * (num_versions + 4) / 2
    with server_of(OURS, "numbered", folder) as server:
        quiet = [poisson(folder, server.target(), RATE, seconds, 1.0, seed, check="version")]
        swapped = with_swaps(server, folder, num_versions, seed)
        quiet.append(poisson(folder, server.target(), RATE, seconds, 1.0, seed, check="version"))
    versions = sorted(set(swapped.versions.tolist()) - {0})
    print(f"swaps: {swapped.line()}; {len(versions)} versions answered", flush=True)
    print(f"without, before and after: {', '.join(one.line() for one in quiet)}", flush=True)
    kept = {
        "failed": float(sum(swapped.failures.values())),
        "mixed": float(swapped.failures.get("mixed", 0)),
        "p99": swapped.ms(99),
        "quiet p99": sum(one.ms(99) for one in quiet) / 2,
        "answered": float(len(versions)),
        "requests": float(len(swapped.due_s)),
    }
    for name, value in kept.items():
        found.setdefault(name, []).append(value)


def rows_of(found: dict[str, list[float]], num_versions: int) -> list[Row]:
    """Failures and mixtures are counted over all runs."""
    title = f"{num_versions} version swaps under {RATE:.0f} requests/s"
    note = f"{sum(found['requests']):,.0f} requests in all; {min(found['answered']):.0f} versions or more answered"
    return [
        compare(f"{title}: failed requests", "requests", "lower", [sum(found["failed"])], bar=0.0, bar_kind="value",
                note=note),
        compare(f"{title}: answers of mixed versions", "requests", "lower", [sum(found["mixed"])], bar=0.0,
                bar_kind="value"),
        compare(f"{title}: p99", "ms", "lower", found["p99"], found["quiet p99"], "without swaps", BAR, "ratio"),
    ]  # fmt: skip


def main() -> None:
    chosen = options(__doc__, runs=3)
    num_versions = 10 if chosen.quick else 100
    found: dict[str, list[float]] = {}
    with scratch() as folder:
        for seed in range(chosen.runs):
            measure(folder, num_versions, seed, found)
    write("serving_swaps", rows_of(found, num_versions), chosen.results)


if __name__ == "__main__":
    main()
