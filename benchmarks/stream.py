"""Streams: the answers' latency through a real broker, and learning beside deep-river on two real series.

    python -m benchmarks.stream [--runs N] [--quick] [--only latency learning]

*latency*: 1,000 simulated sensors at 1 Hz, mosquitto, and `python jobs/stream.py`, each a process of its own on the
same machine. A latency is from just before the publication of a reading to the arrival of its forecast at the
publisher. What the learner's start has held up is left out: the first `WARM_UP_S`.

*learning*: an LSTM of 32 units that forecasts the next value, and learns from it over 16 steps: our trainer beside
deep-river's RollingRegressor with the same network, optimiser, features and target, one thread each, one after the
other. Both take the best of three learning rates by their own error. deep-river computes one message at a time; for
1,000 series it needs 1,000 regressors, and its time a message is the same. Ours computes the series of a moment at
once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import shoal.runs
from benchmarks.children import DEEPRIVER_PYTHON, OUR_PYTHON, ROOT, Child, scratch
from benchmarks.result import Row, compare, options, write
from shoal.libs.stream.mqtt import PrivateBroker, SensorSource
from shoal.libs.stream.spec import SensorTopicSpec
from shoal.sources.source import StreamState

LATENCY_BAR_MS, SPEED_BAR, ERROR_BAR = 10.0, 20.0, 1.0
SENSORS, RATE_HZ, WARM_UP_S = 1000, 1.0, 20.0
HIDDEN, STEPS = 32, 16
MOMENTS = 50  # of 1,000 series
RATES = (0.001, 0.003, 0.01)
SERIES = ("water flow", "approval")
TIMEOUT_S = 900.0


def measure_latency(seconds: float, folder: Path) -> dict[str, float]:
    """Percentiles of the latency in ms, and how many messages were published and not learnt."""
    environment = {**os.environ, "SHOAL_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    os.environ["SHOAL_HOME"] = environment["SHOAL_HOME"]
    num_messages = int(SENSORS * RATE_HZ * (WARM_UP_S + seconds))
    with PrivateBroker(folder / "broker") as broker:
        session = SensorSource(SensorTopicSpec(broker=broker.address, client_id="bench"), 1)
        session.open(StreamState())  # from here on the broker holds messages for the learner
        session.close()
        words = ["-m", "shoal.libs.stream.fleet", "--broker", broker.address, "--sensors", str(SENSORS)]
        words += ["--rate-hz", str(RATE_HZ), "--messages", str(num_messages), "--answers"]
        fleet = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        learner = subprocess.run(
            [sys.executable, "jobs/stream.py", f"mqtt.broker={broker.address}", "mqtt.client_id=bench",
             f"max_messages={num_messages}", f"max_wall_s={2 * WARM_UP_S + seconds + 60}"],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        said = json.loads(fleet.communicate(timeout=60)[0])
    if learner.returncode:
        raise RuntimeError(f"the learner failed: {learner.stdout[-2000:]}{learner.stderr[-2000:]}")
    learnt = shoal.runs.load("latest").last_events()["trained"]["steps"]
    latencies = [each for each in said["latencies_ms"][int(SENSORS * RATE_HZ * WARM_UP_S) :] if each is not None]
    middle, high, highest = np.percentile(latencies, (50, 99, 100))
    return {
        "p50": float(middle),
        "p99": float(high),
        "max": float(highest),
        "unlearnt": num_messages - learnt,
        "unanswered": num_messages - int(SENSORS * RATE_HZ * WARM_UP_S) - len(latencies),
    }


def latency_rows(runs: int, seconds: float) -> list[Row]:
    found = []
    for _ in range(runs):
        with scratch() as folder:
            found.append(measure_latency(seconds, folder))
        print(found[-1], flush=True)
    name = f"{SENSORS:,} sensors at {RATE_HZ:g} Hz through mosquitto"
    highest = max(each["max"] for each in found)
    note = f"{seconds:g} s, after {WARM_UP_S:g} s of warm-up; learn_every=1; highest {highest:.0f} ms"
    return [
        compare(f"{name}: answer, p99", "ms", "lower", [each["p99"] for each in found], bar=LATENCY_BAR_MS,
                bar_kind="value", note=note),
        compare(f"{name}: answer, p50", "ms", "lower", [each["p50"] for each in found], note=note),
        compare(f"{name}: messages not learnt", "messages", "lower", [each["unlearnt"] for each in found], bar=0.0,
                bar_kind="value", note="published less learnt, warm-up included"),
        compare(f"{name}: messages not answered", "messages", "lower", [each["unanswered"] for each in found]),
    ]  # fmt: skip


def learning_rows(runs: int, count: int) -> list[Row]:
    """Rows of each series; count: of its messages, 0: all."""
    environment = {"OMP_NUM_THREADS": "1"}
    with (
        scratch() as folder,
        Child([DEEPRIVER_PYTHON, "-m", "benchmarks.peers.deep_river"], folder, env=environment) as peer,
        Child([OUR_PYTHON, "-m", "benchmarks.ours.stream_learning"], folder, env=environment) as ours,
    ):
        return [row for series in SERIES for row in _compare_series(series, runs, count, peer, ours)]


def _compare_series(series: str, runs: int, count: int, peer: Child, ours: Child) -> list[Row]:
    values = peer.ask(TIMEOUT_S, series=series)["values"]

    def ask_peer(rate: float) -> dict[str, Any]:
        return peer.ask(TIMEOUT_S, series=series, hidden=HIDDEN, window=STEPS, rate=rate, count=count)

    def ask_ours(rate: float, num_series: int, learn_every: int, moments: int = count) -> dict[str, Any]:
        return ours.ask(
            TIMEOUT_S, values=values, num_series=num_series, hidden=HIDDEN, num_steps=STEPS, rate=rate,
            learn_every=learn_every, count=moments,
        )  # fmt: skip

    peer_rate = min(RATES, key=lambda rate: ask_peer(rate)["mae"])
    chosen = {every: min(RATES, key=lambda rate: ask_ours(rate, 1, every)["mae"]) for every in (1, STEPS)}
    sides: dict[str, list[dict[str, Any]]] = {"peer": [], "1, every": [], "1, sixteenth": [], "1000, every": []}
    for _ in range(runs):
        sides["peer"].append(ask_peer(peer_rate))
        sides["1, every"].append(ask_ours(chosen[1], 1, 1))
        sides["1, sixteenth"].append(ask_ours(chosen[STEPS], 1, STEPS))
        sides["1000, every"].append(ask_ours(chosen[1], 1000, 1, MOMENTS))
        print(series, {name: found[-1] for name, found in sides.items()}, flush=True)
    name = "deep-river RollingRegressor"
    error = sides["peer"][0]["as_now"]

    def pick(side: str, key: str) -> list[float]:
        return [each[key] for each in sides[side]]

    note = f'{len(values):,} values; learning rates {chosen[1]:g} and {peer_rate:g}; "as now" has {error:.4g}'
    many = "1,000 shifted copies at once; ours batches them, deep-river takes one message after the other"
    return [
        compare(f"{series}, 1 series, an update a message: error", "MAE", "lower", pick("1, every", "mae"),
                pick("peer", "mae"), name, ERROR_BAR, "ratio", note),
        compare(f"{series}, 1 series, an update a message", "messages/s", "higher", pick("1, every", "per_s"),
                pick("peer", "per_s"), name, note=note),
        compare(f"{series}, 1 series, an update each {STEPS} messages: error", "MAE", "lower",
                pick("1, sixteenth", "mae"), pick("peer", "mae"), name, note=f"learning rate {chosen[STEPS]:g}"),
        compare(f"{series}, 1 series, an update each {STEPS} messages", "messages/s", "higher",
                pick("1, sixteenth", "per_s"), pick("peer", "per_s"), name),
        compare(f"{series}, 1,000 series, an update a message of each", "messages/s", "higher",
                pick("1000, every", "per_s"), pick("peer", "per_s"), name, SPEED_BAR, "ratio", many),
    ]  # fmt: skip


def main() -> None:
    chosen = options(__doc__, runs=3, only=("latency", "learning"))
    rows: list[Row] = []
    if "latency" in chosen.only:
        rows += latency_rows(chosen.runs, 5.0 if chosen.quick else 60.0)
    if "learning" in chosen.only:
        rows += learning_rows(chosen.runs, 100 if chosen.quick else 0)
    write("stream", rows, chosen.results)


if __name__ == "__main__":
    main()
