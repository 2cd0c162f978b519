"""A small model, one row of JSON a request: our endpoint beside five servers, closed loop at 1, 16 and 64 connections.

    python -m benchmarks.serving.small [--runs N] [--quick] [--only SERVER ...]

An MLP 64-256-10, the same bytes for every server, one worker each with one torch thread, and all of it on one machine
with the driver. The processor time that a server's processes take for a request is told beside the rates: it is what
decides on a machine where the driver and the server share the cores, and it hardly depends on who else is there.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.children import scratch
from benchmarks.result import BarKind, Better, Row, compare, options, write
from benchmarks.serving.drive import closed
from benchmarks.serving.servers import MOSEC, OURS, PEERS, RAY_SERVE, Server, server_of

CONNECTIONS = (1, 16, 64)
METRICS: tuple[tuple[str, str, str, Better], ...] = (
    ("per_s", "throughput", "requests/s", "higher"),
    ("p50_ms", "p50", "ms", "lower"),
    ("p99_ms", "p99", "ms", "lower"),
    ("cpu_us", "processor time of the server", "µs", "lower"),
)
BARS = {("per_s", 16, MOSEC): 2.5, ("per_s", 64, MOSEC): 1.0} | {("per_s", num, RAY_SERVE): 8.0 for num in CONNECTIONS}
P50_BAR_MS = 0.5  # at one connection
Found = dict[tuple[str, int, str], list[float]]  # by server, connections, metric


def measure(server: Server, folder: Path, num: int, seconds: float) -> dict[str, float]:
    """One closed loop."""
    warm_up_s = seconds / 4
    target, before_s = server.target(), server.child.cpu_s()
    outcome = closed(folder, target, num, seconds, warm_up_s)
    used_s = (server.child.cpu_s() - before_s) * seconds / (seconds + warm_up_s)
    print(f"{server.name}, {server.workload}, {num:2} connections: {outcome.line()}", flush=True)
    return {
        "per_s": outcome.per_s,
        "p50_ms": outcome.ms(50),
        "p99_ms": outcome.ms(99),
        "cpu_us": 1e6 * used_s / max(1, len(outcome.due_s)),
    }


def rows_of(found: Found, peers: list[str]) -> list[Row]:
    """One row for each metric, number of connections and peer."""
    rows = []
    for metric, word, unit, better in METRICS:
        for num in CONNECTIONS:
            title = f"small model, JSON, {word}, {num} connection{'s' if num > 1 else ''}"
            for peer in peers:
                bar = BARS.get((metric, num, peer))
                kind: BarKind | None = "ratio" if bar else None
                if metric == "p50_ms" and num == 1 and peer == peers[0]:
                    bar, kind = P50_BAR_MS, "value"  # of our own: said once
                ours, theirs = found[OURS, num, metric], found[peer, num, metric]
                rows.append(compare(title, unit, better, ours, theirs, peer, bar, kind))
    return rows


def main() -> None:
    chosen = options(__doc__, runs=3, only=PEERS)
    peers = [peer for peer in PEERS if peer in chosen.only]
    found: Found = {}
    with scratch() as folder:
        for _ in range(chosen.runs):
            for name in (OURS, *peers):
                with server_of(name, "mlp", folder) as server:
                    for num in CONNECTIONS:
                        for metric, value in measure(server, folder, num, 1.0 if chosen.quick else 4.0).items():
                            found.setdefault((name, num, metric), []).append(value)
    write("serving_small", rows_of(found, peers), chosen.results)


if __name__ == "__main__":
    main()
