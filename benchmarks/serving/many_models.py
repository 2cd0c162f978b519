"""A hundred models of which twenty fit: hits, latency and errors, beside Ray Serve's `@serve.multiplexed`.

    python -m benchmarks.serving.many_models [--runs N] [--quick]

Both have two replicas with memory for ten models each. Requests of one row come at Poisson times, their models by
Zipf's law, the same for both. A request is a hit when it finds its model loaded. An oracle that holds the twenty least
recently used models of the same trace has a hit rate, too. Then the p99 of a hot model is taken while twenty cold ones
load, beside that without loads, in turns.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import local
from urllib.parse import urlsplit

import numpy as np

from benchmarks.children import OUR_PYTHON, PEERS_PYTHON, Child, scratch
from benchmarks.result import Row, compare, options, write
from benchmarks.serving.many_network import NUM_FEATURES, name_of, save
from shoal.cluster.ports import find_free_port

NUM_MODELS, NUM_FIT, NUM_COLD, SKEW = 100, 20, 20, 1.1
RATE, HOT_RATE = 15.0, 40.0
NUM_THREADS, NUM_WINDOWS = 32, 10
START_S, ANSWER_S = 240.0, 60.0
PEER = "Ray Serve's multiplexing"
X = [[0.1] * NUM_FEATURES]


@dataclass
class Served:
    """A server under test. url: of our endpoint, or of the peer's."""

    url: str
    is_ours: bool
    connections: local = field(default_factory=local)

    def ask(self, name: str) -> tuple[str, bytes]:
        """The status, and the body."""
        connection = getattr(self.connections, "http", None)
        if connection is None:
            connection = self.connections.http = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=ANSWER_S)
        tensor = {"name": "x", "shape": [1, NUM_FEATURES], "datatype": "FP32", "data": X[0]}
        try:
            if self.is_ours:
                connection.request("POST", f"/v2/models/{name}/infer", json.dumps({"inputs": [tensor]}))
            else:
                connection.request("POST", "/", json.dumps({"x": X}), {"serve_multiplexed_model_id": name})
            response = connection.getresponse()
            return str(response.status), response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return type(error).__name__, b""

    def count_waited(self) -> int:
        """Of our endpoint: how many requests have waited for a load."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=ANSWER_S)
        connection.request("GET", "/shoal/v1/status")
        models = json.loads(connection.getresponse().read())["models"]
        connection.close()
        return sum(model["residency"]["waited"] for model in models)


@dataclass(frozen=True)
class Traffic:
    """What became of a trace. latency_s: of the answered requests, from the moment they were due"""

    latency_s: np.ndarray
    hits: float
    errors: Counter[str]

    def ms(self, percent: float) -> float:
        return float(1e3 * np.percentile(self.latency_s, percent))


def make_trace(seed: int, seconds: float) -> list[tuple[float, str]]:
    """(seconds, model) of each request."""
    draw = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, NUM_MODELS + 1) ** SKEW
    due_s = np.cumsum(draw.exponential(1.0 / RATE, int(RATE * seconds)))
    models = draw.choice(NUM_MODELS, len(due_s), p=weights / weights.sum())
    return [(float(when), name_of(int(model))) for when, model in zip(due_s, models, strict=True)]


def count_oracle_hits(trace: Sequence[tuple[float, str]]) -> float:
    """The share of hits if the least recently used models leave."""
    resident: OrderedDict[str, None] = OrderedDict()
    hits = 0
    for _, name in trace:
        if name in resident:
            hits += 1
            resident.move_to_end(name)
        else:
            resident[name] = None
            if len(resident) > NUM_FIT:
                resident.popitem(last=False)
    return hits / len(trace)


def replay(served: Served, trace: Sequence[tuple[float, str]]) -> Traffic:
    """Send each request when it is due."""
    waited = served.count_waited() if served.is_ours else 0
    began_s = time.monotonic()

    def one(due_s: float, name: str) -> tuple[float, str, bytes]:
        status, body = served.ask(name)
        return time.monotonic() - began_s - due_s, status, body

    asked = []
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for due_s, name in trace:
            time.sleep(max(0.0, began_s + due_s - time.monotonic()))
            asked.append(pool.submit(one, due_s, name))
    answers = [each.result() for each in asked]
    answered = [each for each in answers if each[1] == "200"]
    if served.is_ours:
        time.sleep(2.5)  # until the replicas have reported
        hits = 1.0 - (served.count_waited() - waited) / len(trace)
    else:
        hits = sum(json.loads(body)["hit"] for _, _, body in answered) / len(trace)
    errors = Counter(status for _, status, _ in answers if status != "200")
    return Traffic(np.array([seconds for seconds, _, _ in answered]), hits, errors)


def measure_hot(served: Served, seconds: float, cold: Sequence[str]) -> list[float]:
    """Latencies of the hottest model's answers in milliseconds, while the cold ones load at even distances."""
    draw = np.random.default_rng(1)
    due_s = np.cumsum(draw.exponential(1.0 / HOT_RATE, int(HOT_RATE * seconds)))
    hot = [(float(when), name_of(0)) for when in due_s]
    loads = [((place + 0.5) * seconds / len(cold), name) for place, name in enumerate(cold)]
    began_s, found = time.monotonic(), []

    def one(when_s: float, name: str) -> None:
        assert served.ask(name)[0] == "200"
        if name == name_of(0):
            found.append(1e3 * (time.monotonic() - began_s - when_s))

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for when_s, name in sorted([*hot, *loads]):
            time.sleep(max(0.0, began_s + when_s - time.monotonic()))
            pool.submit(one, when_s, name)
    return found


def compare_hot(served: Served, seconds: float) -> tuple[float, float]:
    """p99 of the hottest model without loads and with twenty, in windows that take turns: another program that comes
    or goes meets both."""
    cold = [name_of(NUM_MODELS - 1 - number) for number in range(NUM_COLD)]
    measure_hot(served, 1.0, [name_of(1)])
    quiet, busy = [], []
    for window in range(NUM_WINDOWS):
        quiet += measure_hot(served, seconds / NUM_WINDOWS, [])
        busy += measure_hot(served, seconds / NUM_WINDOWS, cold[window::NUM_WINDOWS])
    return float(np.percentile(quiet, 99)), float(np.percentile(busy, 99))


@contextmanager
def serve(is_ours: bool, folder: Path) -> Iterator[Served]:
    """One of the two, up and answering."""
    mark = os.urandom(3).hex()
    numbers = [str(NUM_FIT), str(folder)]
    if is_ours:
        words = [OUR_PYTHON, "-m", "benchmarks.ours.many_models", str(NUM_MODELS), *numbers]
        with Child(words, folder, {"SHOAL_HOME": str(folder / f"home-{mark}")}) as child:
            yield Served(child.answer(START_S)["url"], True)
        return
    port, ray_folder = find_free_port(), folder / f"ray-{mark}"
    words = [PEERS_PYTHON, "-m", "benchmarks.peers.ray_serve_multiplexed", str(port), str(ray_folder), *numbers]
    with Child(words, folder, {}, ray_folder) as child:
        child.answer(START_S)
        yield Served(f"http://127.0.0.1:{port}", False)


def rows_of(found: dict[bool, list[Traffic]], oracle: list[float], quiet: list[float], busy: list[float]) -> list[Row]:
    """The bars are for the oracle and for the hot model."""
    ours, theirs = found[True], found[False]
    where = f"{NUM_MODELS} models, {NUM_FIT} fit"
    points = [100 * (best - one.hits) for best, one in zip(oracle, ours, strict=True)]
    errors = f"errors: {dict(sum((one.errors for one in ours), Counter()))}, {PEER}: "
    errors += f"{dict(sum((one.errors for one in theirs), Counter()))}"
    note = f"without: {float(np.median(quiet)):.1f} ms; load average of the machine: {os.getloadavg()[1]:.1f}"
    ratios = [loaded / alone for loaded, alone in zip(busy, quiet, strict=True)]
    return [
        compare(f"{where}: points below an oracle's hit rate", "points", "lower", points, bar=2.0, bar_kind="value",
                note=f"oracle, the least recently used leave: {100 * float(np.median(oracle)):.1f}%"),
        compare(f"{where}: hits", "%", "higher", [100 * one.hits for one in ours], [100 * one.hits for one in theirs],
                PEER, note=errors),
        compare(f"{where}: p50", "ms", "lower", [one.ms(50) for one in ours], [one.ms(50) for one in theirs], PEER),
        compare(f"{where}: p99", "ms", "lower", [one.ms(99) for one in ours], [one.ms(99) for one in theirs], PEER),
        compare("p99 of a hot model while 20 cold ones load, by that without", "times", "lower", ratios, bar=1.2,
                bar_kind="value", note=note),
    ]  # fmt: skip


def main() -> None:
    chosen = options(__doc__, runs=3)
    seconds, hot_s = (10.0, 5.0) if chosen.quick else (60.0, 20.0)
    found: dict[bool, list[Traffic]] = {True: [], False: []}
    oracle, quiet, busy = [], [], []
    with scratch() as folder:
        for number in range(NUM_MODELS):
            save(folder, number)
        for run in range(chosen.runs):
            trace = make_trace(run, seconds)
            oracle.append(count_oracle_hits(trace))
            for is_ours in (True, False):
                with serve(is_ours, folder) as served:
                    traffic = replay(served, trace)
                    found[is_ours].append(traffic)
                    told = f"hits {traffic.hits:.1%}, p50 {traffic.ms(50):.1f}, p99 {traffic.ms(99):.1f} ms"
                    print(f"{'Shoal' if is_ours else PEER}: {told}, errors {dict(traffic.errors)}", flush=True)
                    if is_ours:
                        alone, loaded = compare_hot(served, hot_s)
                        quiet.append(alone)
                        busy.append(loaded)
                        print(f"hot: p99 {alone:.1f} ms alone, {loaded:.1f} while others load", flush=True)
    write("serving_many_models", rows_of(found, oracle, quiet, busy), chosen.results)


if __name__ == "__main__":
    main()
