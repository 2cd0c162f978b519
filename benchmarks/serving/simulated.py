"""A model whose cost is known (20 ms + 0.5 ms a row, at most 32), Poisson arrivals: ours beside an oracle and windows.

    python -m benchmarks.serving.simulated [--runs N] [--quick]

The oracle is computed from the very arrivals: one slot, never idle while a request waits. The classic batcher is mosec
with the best of several windows, chosen for each load by its p99; Ray Serve as shipped has its window of 5 ms.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.children import scratch
from benchmarks.result import BarKind, Row, compare, options, write
from benchmarks.serving.drive import Outcome, poisson
from benchmarks.serving.oracle import work_conserving
from benchmarks.serving.servers import MOSEC, OURS, RAY_SERVE, server_of

RATES = (60, 200, 400, 800)
WINDOWS_MS = (1, 5, 10, 20, 40)
BAR, BARS = 1.1, {(400, 99): 1.05}  # by rate and percent, where it is another
ORACLE, CLASSIC = "oracle", "mosec at its best window"
PERCENTS = (50, 99)
Found = dict[tuple[str, int, int], list[float]]  # by server, rate, percent


def measure(name: str, folder: Path, seconds: float, seed: int, window_ms: int = 0) -> dict[int, Outcome]:
    """Every rate."""
    settings = {"BENCH_WINDOW_MS": str(window_ms)} if window_ms else {}
    with server_of(name, "sleeper", folder, **settings) as server:
        found = {rate: poisson(folder, server.target(), rate, seconds, 1.0, seed) for rate in RATES}
    for rate, outcome in found.items():
        print(f"{name}{f', {window_ms} ms' if window_ms else ''}, {rate}/s: {outcome.line()}", flush=True)
    return found


def one_run(folder: Path, seconds: float, seed: int, windows_ms: tuple[int, ...], found: Found) -> None:
    """Everything once, with the same arrivals."""

    def keep(name: str, rate: int, values_ms: list[float]) -> None:
        for percent, value in zip(PERCENTS, values_ms, strict=True):
            found.setdefault((name, rate, percent), []).append(value)

    ours = measure(OURS, folder, seconds, seed)
    serve = measure(RAY_SERVE, folder, seconds, seed)
    classic = [measure(MOSEC, folder, seconds, seed, window_ms) for window_ms in windows_ms]
    for rate in RATES:
        best = min((one[rate] for one in classic), key=lambda outcome: outcome.ms(99))
        for name, outcome in ((OURS, ours[rate]), (RAY_SERVE, serve[rate]), (CLASSIC, best)):
            keep(name, rate, [outcome.ms(percent) for percent in PERCENTS])
        latencies_s = work_conserving(ours[rate].due_s.tolist())
        keep(ORACLE, rate, [1e3 * float(np.percentile(latencies_s, percent)) for percent in PERCENTS])


def rows_of(found: Found) -> list[Row]:
    """p50 and p99 for each rate, beside each."""
    rows = []
    for rate in RATES:
        for percent in PERCENTS:
            bar = BARS.get((rate, percent), BAR)
            for peer in (ORACLE, CLASSIC, RAY_SERVE):
                title = f"simulated model, p{percent}, {rate} requests/s"
                kind: BarKind | None = "ratio" if peer == ORACLE else None
                ours, theirs = found[OURS, rate, percent], found[peer, rate, percent]
                rows.append(compare(title, "ms", "lower", ours, theirs, peer, bar if kind else None, kind))
    return rows


def main() -> None:
    chosen = options(__doc__, runs=3)
    seconds, windows_ms = (3.0, WINDOWS_MS[1:2]) if chosen.quick else (10.0, WINDOWS_MS)
    found: Found = {}
    with scratch() as folder:
        for seed in range(chosen.runs):
            one_run(folder, seconds, seed, windows_ms, found)
    write("serving_simulated", rows_of(found), chosen.results)


if __name__ == "__main__":
    main()
