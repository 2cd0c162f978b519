"""The small model with binary tensors over HTTP, and over gRPC, beside its own JSON and beside peers that take bytes.

python -m benchmarks.serving.binary [--runs N] [--quick]
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.children import scratch
from benchmarks.result import Row, compare, options, write
from benchmarks.serving.drive import Outcome, Target, closed
from benchmarks.serving.grpc_call import INFER_PATH, messages
from benchmarks.serving.servers import MOSEC, OURS, UVICORN, Server, server_of

CONNECTIONS = (1, 16, 64)
JSON, BINARY, GRPC = "JSON", "binary over HTTP", "gRPC"
PEERS = (MOSEC, UVICORN)
Found = dict[tuple[str, str, int], list[Outcome]]


def targets(server: Server) -> dict[str, Target]:
    """The ways to ask our endpoint that was started for binary requests."""
    return {
        BINARY: server.target(),
        GRPC: Target(f"http://{server.said['grpc']}", messages(server.workload, server.said["model"]), INFER_PATH),
    }


def measure(folder: Path, seconds: float, found: Found) -> None:
    """One run of everything."""

    def keep(server: Server, way: str, target: Target) -> None:
        for num in CONNECTIONS:
            outcome = closed(folder, target, num, seconds, seconds / 4)
            print(f"{server.name}, {way}, {num:2} connections: {outcome.line()}", flush=True)
            found.setdefault((server.name, way, num), []).append(outcome)

    with server_of(OURS, "mlp", folder) as server:
        keep(server, JSON, server.target())
    with server_of(OURS, "mlp_binary", folder, grpc_port=0) as server:
        for way, target in targets(server).items():
            keep(server, way, target)
    for name in PEERS:
        with server_of(name, "mlp_binary", folder) as server:
            keep(server, BINARY, server.target())


def rows_of(found: Found) -> list[Row]:
    """Each way beside our JSON, then binary beside the peers."""
    rows = []
    for num in CONNECTIONS:
        beside = [(way, OURS, JSON, 1.0) for way in (BINARY, GRPC)] + [(BINARY, peer, BINARY, None) for peer in PEERS]
        for way, name, other, bar in beside:
            title = f"small model, {way}, throughput, {num} connection{'s' if num > 1 else ''}"
            ours, theirs = ([one.per_s for one in found[key]] for key in ((OURS, way, num), (name, other, num)))
            peer = f"{name}, {other}" if name == OURS else name
            rows.append(compare(title, "requests/s", "higher", ours, theirs, peer, bar, "ratio" if bar else None))
    return rows


def main() -> None:
    chosen = options(__doc__, runs=3)
    found: Found = {}
    with scratch() as folder:
        for _ in range(chosen.runs):
            measure(folder, 1.0 if chosen.quick else 3.0, found)
    write("serving_binary", rows_of(found), chosen.results)


if __name__ == "__main__":
    main()
