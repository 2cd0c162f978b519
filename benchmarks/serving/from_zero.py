"""A sleeping endpoint's first answer, beside the start of a replica of plain Ray Serve; whether a request is refused.

    python -m benchmarks.serving.from_zero [--runs N] [--quick]

Both sleep in one cluster (`sleepers`), and are woken in turns, N times each, by ten requests in JSON on fresh
connections at once. "Replica start" is the time from the first of these requests to the moment at which Serve's log
says that the replica runs: the control loop that notices the request, the process, its imports, the model, and the
control loop that notices the replica. The bar compares, turn by turn, our first answer with the plain deployment's
replica start, which is before its own first answer. The plain deployment profits from our cluster's forked workers,
which have torch imported: on Ray's own cluster its start takes seconds longer. Python may write and read bytecode, as
in any installation.
"""

from __future__ import annotations

import http.client
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Barrier
from urllib.parse import urlsplit

from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.result import Row, compare, options, write
from benchmarks.serving.sleepers import OURS, PEER
from benchmarks.serving.workloads import body_of, examples

WORKLOAD = "mlp"
NUM_REQUESTS = 10
START_S, ANSWER_S, SLEEP_S = 240.0, 100.0, 150.0
SETTLE_S = 2.0  # after the last replica's end, of which HAProxy and Serve's proxies hear later
PEER_NAME = "plain Ray Serve, its replica's start"
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


def measure(folder: Path, num_turns: int) -> dict[str, list[Wake]]:
    words = [OUR_PYTHON, "-m", "benchmarks.serving.sleepers", WORKLOAD]
    environment = {"SHOAL_HOME": str(folder / "home"), "PYTHONDONTWRITEBYTECODE": ""}
    found: dict[str, list[Wake]] = {OURS: [], PEER: []}
    with Child(words, folder, environment, folder / "r", goodbye_s=30.0) as child:
        said = child.answer(START_S)
        for _ in range(num_turns):
            for name, turns in found.items():
                child.ask(SLEEP_S, do="wait")
                time.sleep(SETTLE_S)
                turns.append(wake(said[name], name, Path(said["logs"])))
                print(name, turns[-1], flush=True)
    return found


def rows_of(found: dict[str, list[Wake]]) -> list[Row]:
    ours, peer = found[OURS], found[PEER]
    starts, firsts = [each.running_s for each in peer], [each.first_s for each in ours]
    beyond = [first_s - start_s for first_s, start_s in zip(firsts, starts, strict=True)]
    refused = [[sum(each.statuses.values()) - each.statuses["200"] for each in turns] for turns in (ours, peer)]
    of = f"{NUM_REQUESTS} requests at a sleeping endpoint"
    note = "turn by turn; the median of their own start is {:.2f} s, of the plain deployment's first answer {:.2f} s"
    medians = [sorted(values)[len(values) // 2] for values in ([e.running_s for e in ours], [e.first_s for e in peer])]
    return [
        compare(f"{of}: first answer beyond the start of a plain replica", "s", "lower", beyond, bar=0.3,
                bar_kind="value", note=note.format(*medians)),
        compare(f"{of}: first answer", "s", "lower", firsts, starts, PEER_NAME),
        compare(f"{of}: last answer", "s", "lower", [each.last_s for each in ours], [each.last_s for each in peer],
                "plain Ray Serve"),
        compare(f"{of}: first answer after Serve says that the replica runs", "s", "lower",
                [each.first_s - each.running_s for each in ours], [each.first_s - each.running_s for each in peer],
                "plain Ray Serve"),
        compare(f"{of}: refused", "requests", "lower", *refused, "plain Ray Serve", 0.0, "value"),
    ]  # fmt: skip


def main() -> None:
    chosen = options(__doc__, runs=9)
    with scratch() as folder:
        found = measure(folder, chosen.runs)
    write("serving_from_zero", rows_of(found), chosen.results)


if __name__ == "__main__":
    main()
