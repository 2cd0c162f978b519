"""Requests a second and latency of a small model over HTTP: our endpoint beside mosec and Ray Serve as shipped.

    python -m benchmarks.endpoint [--runs N] [--quick]

An MLP 64-256-10, one row of JSON a request, the same bytes for every server, one replica each with one torch thread, a
closed loop at 1, 16 and 64 connections from one load generator on the same machine. One server is up at a time, since
also an idle Ray takes a few percent of a core. No server asks for a token here, since the peers have none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.children import OUR_PYTHON, PEERS_PYTHON, Child, scratch
from benchmarks.load import wait_until_served
from benchmarks.model import SMALL, request_body
from benchmarks.result import Better, Row, compare, options, write
from shoal.cluster.serve_environment import free_port

START_TIMEOUT_S = 120.0
CONNECTIONS = (1, 16, 64)
OURS, MOSEC, RAY_SERVE = "Shoal", "mosec", "Ray Serve"
METRICS: tuple[tuple[str, str, str, Better], ...] = (
    ("requests_per_s", "throughput", "requests/s", "higher"),
    ("p50_ms", "p50", "ms", "lower"),
    ("p99_ms", "p99", "ms", "lower"),
)
BARS = {("p50_ms", 1): 0.5, ("requests_per_s", 16): 5500.0}


class Server(NamedTuple):
    """A server that answers at `url`."""

    child: Child
    url: str


@contextmanager
def server_of(name: str, folder: Path) -> Iterator[Server]:
    """One of the three, up and answering."""
    if name == OURS:
        with ours_of(folder, list(SMALL)) as server:
            yield server
        return
    port, ray_folder = free_port(), folder / f"ray-{os.urandom(3).hex()}"
    if name == MOSEC:
        words, path = ["mosec_mlp", "--address", "127.0.0.1", "--port", str(port)], "/inference"
    else:
        words, path = ["ray_serve_mlp", str(port), str(ray_folder)], "/"
    words = [PEERS_PYTHON, "-m", f"benchmarks.peers.{words[0]}", *words[1:]]
    goodbye_s = 0.0 if name == MOSEC else 15.0  # mosec reads no input
    with Child(words, folder, ray_folder=ray_folder, goodbye_s=goodbye_s) as child:
        if name == RAY_SERVE:
            child.answer(START_TIMEOUT_S)
        server = Server(child, f"http://127.0.0.1:{port}{path}")
        wait_until_served(server.url, request_body())
        yield server


@contextmanager
def ours_of(folder: Path, sizes: list[int]) -> Iterator[Server]:
    """Our endpoint with an MLP of these sizes."""
    words = [OUR_PYTHON, "-m", "benchmarks.ours.endpoint", json.dumps(sizes)]
    with Child(words, folder, {"SHOAL_HOME": str(folder / "home")}) as child:
        yield Server(child, child.answer(START_TIMEOUT_S)["url"])


def load(folder: Path, url: str, *words: str, timeout_s: float = 120.0) -> dict[str, Any]:
    """One run of the load generator."""
    body = folder / "body.json"
    body.write_bytes(request_body())
    with Child([OUR_PYTHON, "-m", "benchmarks.load", url, str(body), *words], folder) as generator:
        return generator.answer(timeout_s)


def rows_of(found: dict[tuple[str, int], list[dict[str, Any]]]) -> list[Row]:
    """One row for each metric, number of connections and peer."""
    rows = []
    for metric, word, unit, better in METRICS:
        for num in CONNECTIONS:
            title = f"endpoint, {word}, {num} connection{'s' if num > 1 else ''}"
            bar = BARS.get((metric, num))
            for peer in (MOSEC, RAY_SERVE):
                ours, theirs = ([run[metric] for run in found[name, num]] for name in (OURS, peer))
                kind = "value" if bar is not None and peer == MOSEC else None  # a bar of our own value: say it once
                rows.append(compare(title, unit, better, ours, theirs, peer, bar if kind else None, kind))
    return rows


def measure(name: str, folder: Path, warm_up_s: float, window_s: float) -> dict[int, dict[str, Any]]:
    """Start a server, ask it at each number of connections, end it."""
    found: dict[int, dict[str, Any]] = {}
    with server_of(name, folder) as server:
        for num in CONNECTIONS:
            words = ("--connections", str(num), "--seconds")
            load(folder, server.url, *words, str(warm_up_s))
            run = found[num] = load(folder, server.url, *words, str(window_s))
            print(
                f"{name}, {num:2} connections: {run['requests_per_s']:,.0f} requests/s, p50 {run['p50_ms']:.2f} ms,"
                f" p99 {run['p99_ms']:.2f} ms, failed {len(run['failures'])}",
                flush=True,
            )
    return found


def main() -> None:
    chosen = options(__doc__, runs=3)
    warm_up_s, window_s = (0.5, 1.5) if chosen.quick else (1.0, 4.0)
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    with scratch() as folder:
        for _ in range(chosen.runs):
            for name in (OURS, MOSEC, RAY_SERVE):
                for num, run in measure(name, folder, warm_up_s, window_s).items():
                    found.setdefault((name, num), []).append(run)
    write("endpoint", rows_of(found), chosen.results)


if __name__ == "__main__":
    main()
