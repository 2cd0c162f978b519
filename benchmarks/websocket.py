"""Games over WebSocket beside ZeroMQ, in turns; and what hostile clients and kills do to them.

    python -m benchmarks.websocket [--runs N] [--quick] [--only transports attacks kills]

The gateway computes CartPole's policy (64x64) for 1 or 16 games, each in its process, which ask for one action after
another. *Hostile*: eight games at 60 frames a second, while another process attacks the gateway, beside the same attack
on another gateway of this machine: what is left is what the gateway does, and not what the attacker takes of the
processors. *Kills*: four games; the gateway is killed with -9 three times, a game once, in the middle of episodes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.ours.websocket_game import NUM_ACTORS
from benchmarks.result import Row, compare, options, write

TRANSPORTS = ("zmq", "binary", "text")
ATTACKS = ("fuzz", "origins", "strangers", "session", "idle")
ANSWER_S, WARM_UP_S, FRAME_S = 120.0, 1.0, 1 / 60
NUM_HONEST, NUM_KILLED, LIFE_S = 8, 4, 3.0


class Host:
    """A gateway's process; its folder keeps the ledger."""

    def __init__(self, opened: ExitStack, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.child = opened.enter_context(
            Child([OUR_PYTHON, "-m", "benchmarks.ours.websocket_host", str(folder)], folder)
        )
        begun = self.child.answer(ANSWER_S)
        self.addresses = {"zmq": begun["tcp"], "binary": begun["websocket"], "text": begun["websocket"]}


def start_game(opened: ExitStack, host: Host, kind: str, number: int, period_s: float, *words: str) -> Child:
    command = [OUR_PYTHON, "-m", "benchmarks.ours.websocket_game", kind, host.addresses[kind], str(number)]
    return opened.enter_context(Child([*command, str(period_s), *words], host.folder))


def measure(games: Sequence[Child], seconds: float) -> np.ndarray:
    """The latencies of all games in a window, in seconds, sorted."""
    begin_at = time.monotonic() + WARM_UP_S
    time.sleep(WARM_UP_S + seconds)
    asked = [each.ask(begin_at=begin_at, end_at=begin_at + seconds) for each in games]
    return np.sort(np.concatenate([each["latencies_s"] for each in asked]))


def compare_transports(num_runs: int, seconds: float) -> list[Row]:
    rates, medians = defaultdict[tuple[int, str], list[float]](list), defaultdict[tuple[int, str], list[float]](list)
    for number in range(num_runs):
        for num_games in (1, 16):
            for kind in TRANSPORTS:
                with scratch() as folder, ExitStack() as opened:
                    host = Host(opened, folder / "run")
                    games = [start_game(opened, host, kind, index, 0.0) for index in range(num_games)]
                    time.sleep(0.2 * num_games)
                    found = measure(games, seconds)
                    rates[num_games, kind].append(len(found) / seconds)
                    medians[num_games, kind].append(1e3 * float(np.median(found)))
                shown = f"{rates[num_games, kind][-1]:,.0f} actions/s, p50 {medians[num_games, kind][-1]:.2f} ms"
                print(f"run {number + 1}, {num_games} {kind}: {shown}", flush=True)
    rows = []
    for (num_games, kind), values in rates.items():
        if kind != "zmq":
            name, beside = f"{num_games} games, WebSocket {kind}", "ZeroMQ, Python"
            rows.append(compare(name, "actions/s", "higher", values, rates[num_games, "zmq"], beside))
            p50s = medians[num_games, kind]
            rows.append(compare(f"{name}: p50", "ms", "lower", p50s, medians[num_games, "zmq"], beside))
    return rows


def attack(num_runs: int, seconds: float) -> list[Row]:
    """p99 of honest games, and the memory that an attack adds."""
    rows = []
    for kind in ATTACKS:
        ours, elsewhere, quiet, grown = list[float](), list[float](), list[float](), list[float]()
        with scratch() as folder, ExitStack() as opened:
            host, other = Host(opened, folder / "run"), Host(opened, folder / "other")
            games = [start_game(opened, host, "binary", index, FRAME_S) for index in range(NUM_HONEST)]
            time.sleep(3.0)
            for number in range(num_runs):
                for target, into in ((None, quiet), (other, elsewhere), (host, ours)):
                    before = host.child.ask()
                    with ExitStack() as attacking:
                        if target is not None:
                            words = ["benchmarks.ours.websocket_attack", kind, target.addresses["text"]]
                            hostile = Child([OUR_PYTHON, "-m", *words], folder, goodbye_s=0)
                            attacking.enter_context(hostile).answer(ANSWER_S)
                        into.append(1e3 * float(np.quantile(measure(games, seconds), 0.99)))
                        if target is host:
                            during = host.child.ask()
                            grown.append(during["rss_mb"] - before["rss_mb"])
                            shown = f"{during['connections']} connections, {grown[-1]:+.1f} MB"
                print(
                    f"run {number + 1}, {kind}: p99 {ours[-1]:.2f} ms, elsewhere {elsewhere[-1]:.2f}, quiet"
                    f" {quiet[-1]:.2f}; {shown}",
                    flush=True,
                )
        note = f"without an attack {np.median(quiet):.2f} ms"
        title, beside = f"p99 of honest games beside an attack: {kind}", "attack on another gateway"
        rows.append(compare(title, "ms", "lower", ours, elsewhere, beside, 1.2, "ratio", note))
        rows.append(compare(f"memory that the attack adds: {kind}", "MB", "lower", grown))
    return rows


def kill(folder: Path) -> tuple[int, int, int]:
    """(acknowledged and lost, learnt twice, acknowledged) segments and steps, over the kills."""
    with ExitStack() as opened:
        host = Host(opened, folder / "run")
        words = (1 / 1000, str(host.folder))
        games = [start_game(opened, host, ("binary", "text")[n % 2], n, *words) for n in range(NUM_KILLED)]
        time.sleep(LIFE_S)
        for _ in range(3):
            host.child.process.kill()
            host.child.process.wait()
            host = Host(opened, folder / "run")
            time.sleep(LIFE_S)
        games[0].process.kill()
        games[0] = start_game(opened, host, "binary", NUM_ACTORS, *words)
        time.sleep(LIFE_S)
        for each in games:
            each.process.kill()
            each.process.wait()
        time.sleep(1.0)  # for the consumer
        found = host.child.ask()
        assert found["is_balanced"], found
        num_ended = sum(path.stat().st_size for path in host.folder.glob("ended-*"))
        learnt = np.fromfile(host.folder / "learnt", np.float32)
        assert num_ended
        assert learnt.size
        return max(0, num_ended - found["received"]), learnt.size - np.unique(learnt).size, num_ended


def measure_kills(num_runs: int) -> list[Row]:
    lost, twice, acknowledged = list[float](), list[float](), list[float]()
    for number in range(num_runs):
        with scratch() as folder:
            found = kill(folder)
        print(f"run {number + 1}, kills: {found[0]} lost of {found[2]}, {found[1]} learnt twice", flush=True)
        for values, value in zip((lost, twice, acknowledged), found, strict=True):
            values.append(value)
    note = f"{sum(acknowledged):,.0f} segments acknowledged; {3 * num_runs} kills of the gateway"
    return [
        compare("acknowledged and lost, after kill -9", "", "lower", lost, bar=0, bar_kind="value", note=note),
        compare("learnt twice, after kill -9", "", "lower", twice, bar=0, bar_kind="value", note=note),
    ]


def main() -> None:
    chosen = options(__doc__, runs=5, only=("transports", "attacks", "kills"))
    seconds = 1.0 if chosen.quick else 4.0
    if "transports" in chosen.only:
        write("websocket", compare_transports(chosen.runs, seconds), chosen.results)
    if "attacks" in chosen.only:
        write("websocket_attacks", attack(chosen.runs, seconds), chosen.results)
    if "kills" in chosen.only:
        write("websocket_kills", measure_kills(chosen.runs), chosen.results)


if __name__ == "__main__":
    main()
