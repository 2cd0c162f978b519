"""The small model with binary tensors over HTTP, and over gRPC, beside its own JSON and beside peers that take bytes.

python -m benchmarks.serving.binary [--runs N] [--quick]

gRPC is asked by a call for each request, and by one stream on each connection. Our four ways are asked of one endpoint
in turn, another first each time. Small requests: here a tensor of 64 numbers, as 256 bytes or as JSON.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.children import scratch
from benchmarks.result import Better, Row, compare, options, write
from benchmarks.serving.drive import Target, closed
from benchmarks.serving.exchange import STREAM_PATH
from benchmarks.serving.grpc_call import INFER_PATH, messages
from benchmarks.serving.servers import MOSEC, OURS, UVICORN, Server, server_of

CONNECTIONS = (1, 16, 64)
TURNS = 8  # of our ways, each of less than a second: a machine that others use is not the same for long
JSON, BINARY, GRPC, STREAM = "JSON", "binary over HTTP", "gRPC", "gRPC, one stream"
PEERS = (MOSEC, UVICORN)
METRICS: tuple[tuple[str, str, str, Better], ...] = (
    ("per_s", "throughput", "requests/s", "higher"),
    ("cpu_us", "processor time of the server", "µs", "lower"),
)
Found = dict[tuple[str, str, int, str], list[float]]  # by server, way, connections, metric


def targets(server: Server) -> dict[str, Target]:
    """The ways to ask our endpoint."""
    grpc = messages(server.workload, server.said["model"])
    return {
        JSON: replace(server, workload="mlp").target(),
        BINARY: server.target(),
        GRPC: Target(f"http://{server.said['grpc']}", grpc, INFER_PATH),
        STREAM: Target(f"http://{server.said['grpc']}", grpc, STREAM_PATH),
    }


def measure(folder: Path, turns: int, found: Found) -> None:
    """One run of everything."""

    def keep(server: Server, way: str, target: Target, num: int, seconds: float = 0.7) -> None:
        before_s = server.child.cpu_s()
        outcome = closed(folder, target, num, seconds, seconds / 4)
        used_s = (server.child.cpu_s() - before_s) / 1.25
        print(f"{server.name}, {way}, {num:2} connections: {outcome.line()}", flush=True)
        found.setdefault((server.name, way, num, "per_s"), []).append(outcome.per_s)
        found.setdefault((server.name, way, num, "cpu_us"), []).append(1e6 * used_s / max(1, len(outcome.due_s)))

    with server_of(OURS, "mlp_binary", folder, grpc_port=0) as server:
        ways = list(targets(server).items())
        for turn in range(turns):
            first = turn % len(ways)
            for num in CONNECTIONS:
                for way, target in (*ways[first:], *ways[:first]):
                    keep(server, way, target, num)
    for name in PEERS:
        with server_of(name, "mlp_binary", folder) as server:
            for num in CONNECTIONS:
                keep(server, BINARY, server.target(), num, seconds=3.0)


def rows_of(found: Found) -> list[Row]:
    """Each way beside our JSON, then binary beside the peers. The bar is for throughput."""
    rows = []
    beside = [(way, OURS, JSON) for way in (BINARY, GRPC, STREAM)] + [(BINARY, peer, BINARY) for peer in PEERS]
    for metric, word, unit, better in METRICS:
        for num in CONNECTIONS:
            for way, name, other in beside:
                title = f"small model, {way}, {word}, {num} connection{'s' if num > 1 else ''}"
                ours, theirs = found[OURS, way, num, metric], found[name, other, num, metric]
                bar = 1.0 if name == OURS and metric == "per_s" else None
                peer = f"{name}, {other}" if name == OURS else name
                rows.append(compare(title, unit, better, ours, theirs, peer, bar, "ratio" if bar else None))
    return rows


def main() -> None:
    chosen = options(__doc__, runs=3)
    found: Found = {}
    with scratch() as folder:
        for _ in range(chosen.runs):
            measure(folder, 1 if chosen.quick else TURNS, found)
    write("serving_binary", rows_of(found), chosen.results)


if __name__ == "__main__":
    main()
