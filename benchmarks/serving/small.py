"""A small model, one row of JSON a request: our endpoint beside five servers, closed loop at 1, 16 and 64 connections.

    python -m benchmarks.serving.small [--runs N] [--quick] [--only SERVER ...]

An MLP 64-256-10, the same bytes for every server, one worker each with one torch thread, and all of it on one machine
with the driver. The processor time that a server's processes take for a request is told beside the rates: it is what
decides on a machine where the driver and the server share the cores, and it hardly depends on who else is there.

Then our endpoint is up twice and asked in turns, with `scale`, whose policy sees every request (one replica at most),
and without it, alone and beside a process that computes without end.
"""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.result import BarKind, Better, Row, compare, options, write
from benchmarks.serving.drive import closed
from benchmarks.serving.servers import MOSEC, OURS, PEERS, RAY_SERVE, UVICORN, Server, server_of

CONNECTIONS = (1, 16, 64)
METRICS: tuple[tuple[str, str, str, Better], ...] = (
    ("per_s", "throughput", "requests/s", "higher"),
    ("p50_ms", "p50", "ms", "lower"),
    ("p99_ms", "p99", "ms", "lower"),
    ("cpu_us", "processor time of the server", "µs", "lower"),
)
BARS = {("per_s", num, peer): 1.0 for num in CONNECTIONS for peer in (MOSEC, UVICORN)}
BARS |= {("per_s", num, RAY_SERVE): 8.0 for num in CONNECTIONS} | {("cpu_us", num, MOSEC): 1.0 for num in CONNECTIONS}
TURNS = 10  # of what is asked in turns
PLAIN, SCALED, SCALED_BAR = f"{OURS} without", f"{OURS} with scale", 0.98
BUSY, BUSY_BAR = f"{OURS} beside a busy process", 1.5
P50_BAR_MS = 0.5  # at one connection
Found = dict[tuple[str, int, str], list[float]]  # by server, connections, metric


def count_rows_and_batches(server: Server) -> tuple[int, int]:
    """Of our endpoint, since its start."""
    with urllib.request.urlopen(server.url.removesuffix("/infer") + "/stats") as response:
        versions = json.load(response)["model_stats"]
    return sum(each["inference_count"] for each in versions), sum(each["execution_count"] for each in versions)


def measure(server: Server, folder: Path, num: int, seconds: float) -> dict[str, float]:
    """One closed loop."""
    warm_up_s = seconds / 4
    rows, batches = count_rows_and_batches(server) if server.name == OURS else (0, 0)
    target, before_s = server.target(), server.child.cpu_s()
    outcome = closed(folder, target, num, seconds, warm_up_s)
    used_s = (server.child.cpu_s() - before_s) * seconds / (seconds + warm_up_s)
    print(f"{server.name}, {server.workload}, {num:2} connections: {outcome.line()}", flush=True)
    told = {}
    if server.name == OURS:
        rows_after, batches_after = count_rows_and_batches(server)
        told["batch_rows"] = (rows_after - rows) / max(1, batches_after - batches)
    return told | {
        "per_s": outcome.per_s,
        "p50_ms": outcome.ms(50),
        "p99_ms": outcome.ms(99),
        "cpu_us": 1e6 * used_s / max(1, len(outcome.due_s)),
    }


@contextlib.contextmanager
def busy_process(folder: Path) -> Iterator[None]:
    """A neighbour that takes a core if it can."""
    with Child([OUR_PYTHON, "-c", "while True: pass"], folder, goodbye_s=0.0):
        yield


def measure_in_turns(folder: Path, turns: int, seconds: float, found: Found) -> None:
    """With `scale` and without, another first each time; then without, beside a busy process."""
    with (
        server_of(OURS, "mlp", folder) as plain,
        server_of(OURS, "mlp", folder, scale={"min": 1, "max": 1}) as scaled,
    ):
        for turn in range(turns):
            sides = [(PLAIN, plain), (SCALED, scaled)]
            for num in CONNECTIONS:
                for name, server in sides if turn % 2 else reversed(sides):
                    keep(found, name, num, measure(server, folder, num, seconds))
                with busy_process(folder):
                    keep(found, BUSY, num, measure(plain, folder, num, seconds))


def keep(found: Found, name: str, num: int, values: dict[str, float]) -> None:
    for metric, value in values.items():
        found.setdefault((name, num, metric), []).append(value)


def rows_of(found: Found, peers: list[str]) -> list[Row]:
    """One row for each metric, number of connections and peer, then what was asked in turns."""
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
    for num in CONNECTIONS:
        title = f"small model, JSON, {{}}, {num} connection{'s' if num > 1 else ''}"
        rows.append(compare(title.format("mean batch"), "rows", "higher", found[OURS, num, "batch_rows"]))
        scaled, plain = found[SCALED, num, "per_s"], found[PLAIN, num, "per_s"]
        name = title.format("with scale, throughput")
        rows.append(compare(name, "requests/s", "higher", scaled, plain, PLAIN, SCALED_BAR, "ratio"))
        for side, words, bar in ((SCALED, "with scale", None), (BUSY, "beside a busy process", BUSY_BAR)):
            name = title.format(f"{words}, processor time of the server")
            cpu_us, alone_us = found[side, num, "cpu_us"], found[PLAIN, num, "cpu_us"]
            rows.append(compare(name, "µs", "lower", cpu_us, alone_us, PLAIN, bar, "ratio" if bar else None))
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
                        keep(found, name, num, measure(server, folder, num, 1.0 if chosen.quick else 4.0))
        measure_in_turns(folder, 2 if chosen.quick else TURNS, 0.5 if chosen.quick else 1.0, found)
    write("serving_small", rows_of(found, peers), chosen.results)


if __name__ == "__main__":
    main()
