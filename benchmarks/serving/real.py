"""Real models beside the same peers: the most requests a second that each server answers with a p99 of at most 50 ms.

    python -m benchmarks.serving.real [--runs N] [--quick] [--only SERVER ...]

LeNet on four images a request, a small transformer on 32 tokens, and the same on 4 to 128 tokens (each server pads a
batch to its longest; ours says so in one word). Poisson arrivals; the rate is found by halving an interval, and the
best rate that kept the objective, without a failure, is what counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.children import scratch
from benchmarks.result import Row, compare, options, write
from benchmarks.serving.drive import closed, poisson
from benchmarks.serving.servers import OURS, PEERS, Server, server_of

OBJECTIVE_MS = 50.0
NUM_TRIALS = 6
NAMES = {"images": "LeNet, 4 images", "text": "transformer, 32 tokens", "ragged": "transformer, 4 to 128 tokens"}
SETTINGS: dict[str, dict[str, Any]] = {"ragged": {"model": {"ragged": "pad"}}}


def most(server: Server, folder: Path, seconds: float, num_trials: int, seed: int) -> float:
    """The best rate within the objective; 0 when none is."""
    target = server.target()
    limit = 1.1 * closed(folder, target, 32, seconds, 1.0).per_s
    low, high, best = 0.0, limit, 0.0
    for _ in range(num_trials):
        rate = (low + high) / 2
        outcome = poisson(folder, target, rate, seconds, 1.0, seed)
        if outcome.ms(99) <= OBJECTIVE_MS and not outcome.failures:
            low, best = rate, max(best, outcome.per_s)
        else:
            high = rate
    print(f"{server.name}, {server.workload}: {best:,.0f}/s (closed loop of 32: {limit / 1.1:,.0f}/s)", flush=True)
    return best


def rows_of(found: dict[tuple[str, str], list[float]], peers: list[str]) -> list[Row]:
    """One row for each model and peer."""
    return [
        compare(f"{title}: requests/s with p99 of at most {OBJECTIVE_MS:.0f} ms", "requests/s", "higher",
                found[OURS, workload], found[peer, workload], peer)
        for workload, title in NAMES.items() for peer in peers
    ]  # fmt: skip


def main() -> None:
    chosen = options(__doc__, runs=2, only=PEERS)
    seconds, num_trials = (1.0, 3) if chosen.quick else (4.0, NUM_TRIALS)
    peers = [peer for peer in PEERS if peer in chosen.only]
    found: dict[tuple[str, str], list[float]] = {}
    with scratch() as folder:
        for seed in range(chosen.runs):
            for workload in NAMES:
                for name in (OURS, *peers):
                    settings = SETTINGS.get(workload, {}) if name == OURS else {}
                    with server_of(name, workload, folder, **settings) as server:
                        best = most(server, folder, seconds, num_trials, seed)
                    found.setdefault((name, workload), []).append(best)
    write("serving_real", rows_of(found, peers), chosen.results)


if __name__ == "__main__":
    main()
