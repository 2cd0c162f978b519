"""A sleeping endpoint's first answer, beside the start of a replica of plain Ray Serve; whether a request is refused.

    python -m benchmarks.serving.from_zero [--runs N] [--quick]

Each is woken in turns, N times, by ten requests in JSON on fresh connections at once. A plain replica's start is the
time from the first of these requests to the moment at which Serve's log says that the replica runs: the control loop
that notices the request, the process, its imports, the model, and the control loop that notices the replica. It ends
before the plain deployment's own first answer. Our first answer is compared with it turn by turn:

- with plain Ray Serve as shipped, on Ray's own cluster (the bar);
- with a plain deployment on our cluster, which has what makes our workers start sooner (forks with torch imported), and
  none of what an endpoint needs.

Python may write and read bytecode, as in any installation.
"""

from __future__ import annotations

import http.client
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Barrier
from urllib.parse import urlsplit

from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.result import Row, compare, options, write
from benchmarks.serving.sleepers import OURS, PLAIN, STOCK
from benchmarks.serving.workloads import body_of, examples

WORKLOAD = "mlp"
NUM_REQUESTS = 10
START_S, ANSWER_S, SLEEP_S = 240.0, 100.0, 150.0
SETTLE_S = 2.0  # after the last replica's end, of which HAProxy and Serve's proxies hear later
NAMES = {STOCK: "Ray Serve as shipped", PLAIN: "plain Ray Serve on our cluster"}
_STARTED = re.compile(r"\S+ (\S+ \S+) .*app='(\w+)'\) started successfully .*")


@dataclass(frozen=True)
class Wake:
    """One turn, in seconds from the first request. running_s: until Serve's log says that the replica runs."""

    first_s: float
    last_s: float
    running_s: float
    statuses: Counter[str]


def request(url: str, body: bytes, ready: Barrier) -> tuple[float, float, str]:
    """When it was sent and answered, and its status."""
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.netloc, timeout=ANSWER_S)) as connection:
        ready.wait()
        sent_at = time.time()
        try:
            connection.request("POST", parts.path, body)
            response = connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException) as error:
            return sent_at, time.time(), type(error).__name__
        return sent_at, time.time(), str(response.status)


def find_start(logs: Path, application: str, after: float) -> float:
    """When a replica of the application began to run."""
    lines = [line for file in logs.glob("controller_*.log") for line in file.read_text().splitlines()]
    found = [match for line in lines if (match := _STARTED.fullmatch(line)) and match[2] == application]
    return next(at for at in map(_parse_time, (match[1] for match in found)) if at >= after)


def _parse_time(text: str) -> float:
    return datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f").timestamp()


def wake(url: str, application: str, logs: Path) -> Wake:
    body, ready = body_of(WORKLOAD, examples(WORKLOAD, 1)[0]), Barrier(NUM_REQUESTS)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = [each.result() for each in [pool.submit(request, url, body, ready) for _ in range(NUM_REQUESTS)]]
    begin = min(sent_at for sent_at, _, _ in answers)
    ends = sorted(answered_at - begin for _, answered_at, _ in answers)
    running_s = find_start(logs, application, begin) - begin
    return Wake(ends[0], ends[-1], running_s, Counter(status for _, _, status in answers))


@contextmanager
def sleepers(kind: str, folder: Path) -> Iterator[Child]:
    words = [OUR_PYTHON, "-m", "benchmarks.serving.sleepers", kind, str(folder / kind[0]), WORKLOAD]
    environment = {"SHOAL_HOME": str(folder / "home"), "PYTHONDONTWRITEBYTECODE": ""}
    with Child(words, folder, environment, folder / kind[0], goodbye_s=30.0) as child:
        yield child


def measure(folder: Path, num_turns: int) -> dict[str, list[Wake]]:
    found: dict[str, list[Wake]] = {OURS: [], PLAIN: [], STOCK: []}
    with sleepers(OURS, folder) as ours, sleepers(STOCK, folder) as stock:
        said = {child: child.answer(START_S) for child in (ours, stock)}
        for _ in range(num_turns):
            for name, turns in found.items():
                child = stock if name == STOCK else ours
                child.ask(SLEEP_S, do="wait")
                time.sleep(SETTLE_S)
                turns.append(wake(said[child][name], name, Path(said[child]["logs"])))
                print(name, turns[-1], flush=True)
    return found


def rows_of(found: dict[str, list[Wake]]) -> list[Row]:
    of, ours = f"{NUM_REQUESTS} requests at a sleeping endpoint", found[OURS]
    rows = []
    for name, bar in ((STOCK, 0.3), (PLAIN, None)):
        beyond = [mine.first_s - its.running_s for mine, its in zip(ours, found[name], strict=True)]
        title = f"{of}: first answer beyond a replica's start of {NAMES[name]}"
        rows.append(compare(title, "s", "lower", beyond, bar=bar, bar_kind=bar and "value"))
    for title, value in (
        ("first answer", lambda each: each.first_s),
        ("last answer", lambda each: each.last_s),
        ("replica's start", lambda each: each.running_s),
    ):
        for name, peer in NAMES.items():
            values = [[value(each) for each in turns] for turns in (ours, found[name])]
            rows.append(compare(f"{of}: {title}", "s", "lower", *values, peer))
    refused = [[sum(each.statuses.values()) - each.statuses["200"] for each in turns] for turns in found.values()]
    rows.append(compare(f"{of}: refused", "requests", "lower", refused[0], refused[2], NAMES[STOCK], 0.0, "value"))
    return rows


def main() -> None:
    chosen = options(__doc__, runs=9)
    with scratch() as folder:
        found = measure(folder, chosen.runs)
    write("serving_from_zero", rows_of(found), chosen.results)


if __name__ == "__main__":
    main()
