"""What the console costs an endpoint that it watches: requests/s of a closed loop, with its pages open and without;
and processor time, which a busy machine hardly changes.

    python -m benchmarks.serving.console [--runs N] [--quick]

The console is a process of its own. What the pages of an endpoint, of the clusters and of a model's lineage ask for is
asked for as often as they do it, once a second or every three. The small model answers one row of JSON on 16
connections. Windows with and without take turns, so that what the machine does besides falls on both. Driver, endpoint
and console share the cores. Processor time is that of the idle endpoint, with all processes of
Ray, and of the console. It takes three minutes.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.result import compare, options, write
from benchmarks.serving.drive import closed
from benchmarks.serving.servers import OURS, server_of
from shoal.cluster.ports import find_free_port

CONNECTIONS = 16
BAR = 0.99
PAGES = {"endpoints/watched": 1.0, "cluster": 1.0, "models/model/lineage": 3.0}


@contextmanager
def console_of(url: str, folder: Path) -> Iterator[tuple[str, Child]]:
    """The address of a console that knows the endpoint at `url` as `watched`."""
    home, port = folder / "console-home", find_free_port()
    (home / "endpoints").mkdir(parents=True, exist_ok=True)
    card = {"name": "watched", "url": url, "pid": os.getpid(), "host": socket.gethostname()}
    (home / "endpoints" / "watched.address").write_text(json.dumps(card))
    words = [OUR_PYTHON, "-m", "shoal", "console", "--port", str(port)]
    with Child(words, folder, {"SHOAL_HOME": str(home)}, goodbye_s=0.0) as child:
        address, pause = f"http://127.0.0.1:{port}", threading.Event()
        for _ in range(300):
            try:
                status = json.load(urllib.request.urlopen(f"{address}/api/endpoints/watched", timeout=10))["status"]
                assert status["models"], status
                break
            except urllib.error.URLError:  # it starts
                pause.wait(0.1)
        yield address, child


@contextmanager
def pages_open(address: str) -> Iterator[None]:
    """A browser's requests, each page in a thread."""
    closed_now, failures = threading.Event(), list[str]()

    def follow(page: str, every_s: float) -> None:
        while not closed_now.wait(every_s):
            try:
                urllib.request.urlopen(f"{address}/api/{page}", timeout=10).read()
            except urllib.error.HTTPError as error:
                if "lineage" not in page:  # the model is of no registry: the question costs the same
                    failures.append(f"{page}: {error}")

    threads = [threading.Thread(target=follow, args=each) for each in PAGES.items()]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        closed_now.set()
        for thread in threads:
            thread.join()
    assert not failures, failures


def measure_idle(server: Child, console: Child, seconds: float) -> tuple[float, float]:
    """Milliseconds of processor time in a second: of the endpoint's processes, and of the console."""
    before = server.cpu_s(), console.cpu_s()
    threading.Event().wait(seconds)
    return 1e3 * (server.cpu_s() - before[0]) / seconds, 1e3 * (console.cpu_s() - before[1]) / seconds


def main() -> None:
    chosen = options(__doc__, runs=9)
    seconds, idle_s = (1.5, 1.5) if chosen.quick else (5.0, 3.0)
    rates: dict[bool, list[float]] = {True: [], False: []}  # by whether it is watched
    endpoint_ms: dict[bool, list[float]] = {True: [], False: []}
    console_ms: dict[bool, list[float]] = {True: [], False: []}
    with scratch() as folder, server_of(OURS, "mlp", folder) as server:
        parts, target = urlsplit(server.url), server.target()
        with console_of(f"{parts.scheme}://{parts.netloc}", folder) as (address, console):
            for run in range(chosen.runs):
                for is_watched in (run % 2 == 0, run % 2 == 1):
                    with pages_open(address) if is_watched else nullcontext():
                        rates[is_watched].append(closed(folder, target, CONNECTIONS, seconds).per_s)
                        idle = measure_idle(server.child, console, idle_s)
                    endpoint_ms[is_watched].append(idle[0])
                    console_ms[is_watched].append(idle[1])
    title, unit, peer = "an endpoint that the console watches", "ms in a second", "without a console"
    rows = [
        compare(f"requests/s of {title}", "requests/s", "higher", rates[True], rates[False], peer, BAR, "ratio"),
        compare(f"processor time of {title}, idle", unit, "lower", endpoint_ms[True], endpoint_ms[False], peer),
        compare(
            "processor time of the console", unit, "lower", console_ms[True], console_ms[False], "with no page open"
        ),
    ]
    write("serving_console", rows, chosen.results)


if __name__ == "__main__":
    main()
