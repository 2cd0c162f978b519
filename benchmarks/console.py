"""The console beside TensorBoard and MLflow's page, on the same runs, in headless Chromium; and what it costs a run.

    python -m benchmarks.console [--runs N] [--quick]

The peers, tensorboard==2.21.0 and mlflow==3.17.2, live in an environment of their own (benchmarks/console.txt):
`.venv-console`, or what $CONSOLE_PEERS names. `benchmarks/peers/console_data.py` writes their runs, this script ours:
1,000 runs of 20 steps of 3 metrics, and one of 100,000 steps of 8.

Times are the page's own, from the navigation to the second frame after what is awaited is there, each in a new tab,
with the browser's cache; sides take turns, and the first round is left out. "Drawn": all eight charts have a curve.
Ours shows a sample of 500 steps first, and then replaces it by the least and the greatest value of each of 500 parts
of all 100,000; both moments are measured, with the record not yet read. The peers draw samples of their own. A new
point: from the call of `log` to the frame that has it; peers are left out, since their pages are not told.

A run that is watched: steps of a small network on one thread, every twentieth logged with 8 metrics, with a page's
stream open and without, in turns. Then a server of JSON that logs how many requests it had, every hundredth, likewise:
requests/s of one connection. And the processor time of the console while its page's stream is open, by the second.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.children import OUR_PYTHON, ROOT, Child, scratch
from benchmarks.peers.console_data import FEW_NAMES, FEW_STEPS, LONG, NAMES, make_value
from benchmarks.result import Better, Row, compare, options, write
from shoal import runs
from shoal.cluster.ports import find_free_port
from shoal.runs.record import opening

sys.path.append(str(ROOT / "tests"))
from chromium import Chromium

PEERS = Path(os.environ.get("CONSOLE_PEERS") or ROOT / ".venv-console")
TIMEOUT_S = 120.0
DRAWN = """(() => {
  const look = () => {
    let is_there = false;
    try { is_there = Boolean(%s); } catch {}
    if (!is_there) return requestAnimationFrame(look);
    requestAnimationFrame(() => requestAnimationFrame(() => { window.drawn = performance.now(); }));
  };
  requestAnimationFrame(look);
})()"""
OUR_ROWS = "document.querySelectorAll('tbody a').length > 20"
OUR_CURVES = "[...document.querySelectorAll('.chart')].filter((each) => each.chart.plot).length >= 8"
OUR_EXACT = (
    OUR_CURVES + " && [...document.querySelectorAll('.chart')].every((each) => each.chart.plot.data[0].length > 600)"
)
BOARD_ROWS = "document.querySelectorAll('tb-data-table-content-row').length > 20"
BOARD_CURVES = (
    "document.querySelectorAll('scalar-card line-chart-axis text').length >= 16"
    " && document.querySelectorAll('scalar-card').length >= 8 && !document.querySelector('scalar-card mat-spinner')"
)
FLOW_ROWS = "document.querySelectorAll('.ag-center-cols-container .ag-row, [role=row]').length > 20"
FLOW_CURVES = "document.querySelectorAll('.js-plotly-plot .scatterlayer path.js-line').length >= 8"


def make_runs(num_runs: int, num_steps: int) -> None:
    """Into the record of this $SHOAL_HOME."""
    draw = random.Random(0)
    opening.git_revision = lambda folder: (None, False)  # git is asked a thousand times otherwise
    for number in range(num_runs):
        with runs.create("train", f"task: lenet\nseed: {number}\n", f"run-{number:04d}") as recorder:
            for step in range(FEW_STEPS):
                recorder.log(step, {name: make_value(name, step, draw.random()) for name in FEW_NAMES})
            recorder.finish(runs.Status.FINISHED)
    with runs.create("train", "task: lenet\n", LONG) as recorder:
        for step in range(num_steps):
            recorder.log(step, {name: make_value(name, step, draw.random()) for name in NAMES})
        recorder.finish(runs.Status.FINISHED)


@contextlib.contextmanager
def serve(words: list[str], port: int, folder: Path) -> Iterator[str]:
    """A server, from when it answers; the address of its page."""
    address = f"http://127.0.0.1:{port}/"
    with Child(words, folder, goodbye_s=0):
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                with urllib.request.urlopen(address):
                    break
            except OSError:
                assert time.monotonic() < deadline, words
                time.sleep(0.2)
        yield address


def serve_console(folder: Path) -> contextlib.AbstractContextManager[str]:
    port = find_free_port()
    return serve([OUR_PYTHON, "-m", "shoal", "console", "--port", str(port)], port, folder)


def measure_drawn(browser: Chromium, address: str, condition: str) -> float:
    """Seconds from the navigation to the frame."""
    browser.show("about:blank")
    browser.call("Emulation.setDeviceMetricsOverride", width=1300, height=3000, deviceScaleFactor=1, mobile=False)
    browser.call("Page.enable")
    browser.call("Page.addScriptToEvaluateOnNewDocument", source=DRAWN % condition)
    browser.call("Page.navigate", url=address)
    return wait_in(browser, "window.drawn") / 1000


def wait_in(browser: Chromium, script: str) -> Any:
    deadline = time.monotonic() + TIMEOUT_S
    while not (value := browser.run(script)):
        assert time.monotonic() < deadline, script
        time.sleep(0.02)
    return value


def measure_pages(folder: Path, rounds: int, found: dict[str, list[float]]) -> None:
    told = json.loads((folder / "peers.json").read_text())
    board, flow = [str(PEERS / "bin" / name) for name in ("tensorboard", "mlflow")]
    ports = [find_free_port() for _ in range(3)]
    (folder / "chromium").mkdir()
    browser = Chromium(folder / "chromium")
    store = ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    with contextlib.ExitStack() as open_servers:
        for number, name in enumerate(("runs", "long")):
            words = [board, "--logdir", str(folder / name), "--port", str(ports[number]), "--reload_interval", "0"]
            open_servers.enter_context(serve(words, ports[number], folder))
        open_servers.enter_context(serve([flow, "ui", *store, "--port", str(ports[2])], ports[2], folder))
        boards = [f"http://127.0.0.1:{port}/" for port in ports]
        time.sleep(20.0)  # TensorBoard reads its files in the background
        for number in range(rounds + 1):
            with serve_console(folder) as console:  # a new one: nothing of the long run is in its memory
                cases = {
                    "rows": (f"{console}#/runs", OUR_ROWS),
                    "rows tensorboard": (f"{boards[0]}#timeseries", BOARD_ROWS),
                    "rows mlflow": (f"{boards[2]}#/experiments/0/runs", FLOW_ROWS),
                    "curves": (f"{console}#/run/{LONG}", OUR_CURVES),
                    "curves tensorboard": (f"{boards[1]}#timeseries", BOARD_CURVES),
                    "curves mlflow": (
                        f"{boards[2]}#/experiments/0/runs/{told['mlflow_run']}/model-metrics",
                        FLOW_CURVES,
                    ),
                }
                for name, (address, condition) in cases.items():
                    seconds = measure_drawn(browser, address, condition)
                    if number:
                        found[name].append(seconds)
                    print(f"{name}: {seconds:.3f} s", flush=True)
            with serve_console(folder) as console:
                seconds = measure_drawn(browser, f"{console}#/run/{LONG}", OUR_EXACT)
                if number:
                    found["exact"].append(seconds)
                print(f"exact: {seconds:.3f} s", flush=True)
        with serve_console(folder) as console:
            measure_points(browser, console, 3 * rounds, found)
    browser.close()


def measure_points(browser: Chromium, console: str, count: int, found: dict[str, list[float]]) -> None:
    with runs.create("train", "task: lenet\n", "live-run") as recorder:
        recorder.log(0, {"loss": 1.0})
        recorder.flush()
        browser.show(f"{console}#/run/live-run")
        wait_in(browser, "document.querySelector('.chart')?.chart.plot")
        for step in range(1, count + 1):
            time.sleep(0.2 + random.random() * 0.5)
            last = f"document.querySelector('.chart').chart.plot.data[0].at(-1) >= {step}"
            browser.run(f"window.drawn = 0; {DRAWN % last}")
            began_at = time.time()
            recorder.log(step, {"loss": 1.0 / step})
            wait_in(browser, "window.drawn")
            found["point"].append(browser.run("(performance.timeOrigin + window.drawn) / 1000") - began_at)
        recorder.finish(runs.Status.FINISHED)


@contextlib.contextmanager
def watch(console: str, run: str) -> Iterator[None]:
    """Read a page's stream of a run, and what the page asks for at its start."""
    urllib.request.urlopen(f"{console}api/runs/{run}/curves?points=1000").read()
    stream = urllib.request.urlopen(f"{console}api/stream?runs={run}")
    reader = threading.Thread(target=lambda: [None for _ in stream], daemon=True)
    reader.start()
    try:
        yield
    finally:
        stream.fp.raw._sock.shutdown(2)
        reader.join(5.0)
        stream.close()


def measure_costs(folder: Path, rounds: int, seconds: float, found: dict[str, list[float]]) -> None:
    torch.set_num_threads(1)
    network = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer, batch = torch.optim.SGD(network.parameters(), 1e-3), torch.randn(256, 256)
    with serve_console(folder) as console, runs.create("train", "task: lenet\n", "watched-run") as recorder:
        step = 0

        def time_steps() -> float:
            nonlocal step
            times, end = [], time.monotonic() + seconds
            while time.monotonic() < end:
                began_at = time.perf_counter()
                loss = network(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                times.append(time.perf_counter() - began_at)
                step += 1
                if step % 20 == 0:
                    recorder.log(step, {name: float(loss.detach()) for name in NAMES})
            return statistics.fmean(times)

        time_steps()
        for _ in range(rounds):
            found["step alone"].append(time_steps())
            with watch(console, "watched-run"):
                began_at, used_s = time.monotonic(), find_processor_s(console)
                found["step watched"].append(time_steps())
                share = (find_processor_s(console) - used_s) / (time.monotonic() - began_at)
                found["processor"].append(share)
        with count_requests(recorder) as ask:
            ask(seconds / 4)
            for _ in range(rounds):
                found["requests alone"].append(ask(seconds))
                with watch(console, "watched-run"):
                    found["requests watched"].append(ask(seconds))
        recorder.finish(runs.Status.FINISHED)


def find_processor_s(console: str) -> float:
    """Of the process that listens at the console's port."""
    port = int(console.rstrip("/").rpartition(":")[2])
    ours = psutil.Process().children(recursive=True)
    (server,) = (each for each in ours if f"{port}" in each.cmdline())
    times = server.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def count_requests(recorder: runs.RunRecorder) -> Iterator[Any]:
    """Requests/s of one connection to a server in this process, which logs the number of its requests."""
    import http.client

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet
        count = 0

        def do_GET(self) -> None:
            Handler.count += 1
            if Handler.count % 100 == 0:
                recorder.log(1_000_000 + Handler.count, {"endpoint/requests": float(Handler.count)})
            body = json.dumps({"count": Handler.count}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port)

        def ask(seconds: float) -> float:
            count, began_at = 0, time.monotonic()
            while time.monotonic() < began_at + seconds:
                connection.request("GET", "/")
                connection.getresponse().read()
                count += 1
            return count / (time.monotonic() - began_at)

        yield ask
        connection.close()
        server.shutdown()


def main() -> None:
    chosen = options(__doc__, runs=5)
    num_runs, num_steps, seconds = (50, 5000, 1.0) if chosen.quick else (1000, 100_000, 4.0)
    found = defaultdict[str, list[float]](list)
    with scratch() as folder:
        os.environ["SHOAL_HOME"] = str(folder / "home")
        writer = str(ROOT / "benchmarks/peers/console_data.py")
        with Child([str(PEERS / "bin/python"), writer, str(folder), str(num_runs), str(num_steps)], folder) as peers:
            make_runs(num_runs, num_steps)
            assert peers.process.wait(1800) == 0
        measure_pages(folder, chosen.runs, found)
        measure_costs(folder, 2 * chosen.runs, seconds, found)

    def beside(name: str, key: str, note: str = "") -> list[Row]:
        return [
            compare(name, "s", "lower", found[key], found[f"{key} {peer}"], peer, 1.0, "ratio", note)
            for peer in ("tensorboard", "mlflow")
        ]

    def watched(name: str, unit: str, better: Better, key: str, bar: float) -> Row:
        return compare(name, unit, better, found[f"{key} watched"], found[f"{key} alone"], "unwatched", bar, "ratio")

    rows, curves = f"first paint of {num_runs:,} runs", f"{num_steps:,} steps of 8 metrics, drawn"
    sample, exact = "ours: a sample of 500 steps", "with every peak; the sample is there before"
    made = [
        *beside(rows, "rows"),
        compare(f"{rows}: by itself", "s", "lower", found["rows"], bar=0.5, bar_kind="value"),
        *beside(curves, "curves", sample),
        compare(f"{curves}: by itself", "s", "lower", found["curves"], bar=0.3, bar_kind="value", note=sample),
        compare(f"{curves}: of all values", "s", "lower", found["exact"], note=exact),
        compare("a new point, from `log` to the screen", "s", "lower", found["point"], bar=1.0, bar_kind="value"),
        watched("step of a run that is watched", "s", "lower", "step", 1.01),
        compare("processor of the console, of one page that follows", "cores", "lower", found["processor"]),
        watched("requests of a run that is watched", "requests/s", "higher", "requests", 0.99),
    ]
    write("console", made, chosen.results)


if __name__ == "__main__":
    main()
