"""Requests of 10 MB, binary: throughput and p99 beside Ray Serve as shipped and two that read bytes as they come.

python -m benchmarks.serving.bodies [--runs N] [--quick]

The model does next to nothing with them: what is measured is how a body gets from the socket to the model.
"""

from __future__ import annotations

from benchmarks.children import scratch
from benchmarks.result import BarKind, Row, compare, options, write
from benchmarks.serving.drive import Outcome, closed
from benchmarks.serving.servers import MOSEC, OURS, RAY_SERVE, UVICORN, server_of

NUM_CONNECTIONS = 4
PEERS = (RAY_SERVE, MOSEC, UVICORN)
MAX_BODY_BYTES = 32 * 1024 * 1024


def rows_of(found: dict[str, list[Outcome]]) -> list[Row]:
    """Throughput and p99, by peer; the bars are for Ray Serve."""
    rows = []
    for peer in PEERS:
        kind: BarKind | None = "ratio" if peer == RAY_SERVE else None
        bar = 1.0 if kind else None
        where = f"{NUM_CONNECTIONS} connections"
        ours, theirs = ([one.per_s for one in found[name]] for name in (OURS, peer))
        title = f"bodies of 10 MB, throughput, {where}"
        rows.append(compare(title, "requests/s", "higher", ours, theirs, peer, bar, kind))
        ours, theirs = ([one.ms(99) for one in found[name]] for name in (OURS, peer))
        rows.append(compare(f"bodies of 10 MB, p99, {where}", "ms", "lower", ours, theirs, peer, bar, kind))
    return sorted(rows, key=lambda row: row.unit, reverse=True)


def main() -> None:
    chosen = options(__doc__, runs=3)
    seconds = 2.0 if chosen.quick else 6.0
    found: dict[str, list[Outcome]] = {}
    with scratch() as folder:
        for _ in range(chosen.runs):
            for name in (OURS, *PEERS):
                settings = {"max_body_bytes": MAX_BODY_BYTES} if name == OURS else {}
                with server_of(name, "bodies", folder, **settings) as server:
                    outcome = closed(folder, server.target(), NUM_CONNECTIONS, seconds, 1.0)
                print(f"{name}, 10 MB: {outcome.line()}", flush=True)
                found.setdefault(name, []).append(outcome)
    write("serving_bodies", rows_of(found), chosen.results)


if __name__ == "__main__":
    main()
