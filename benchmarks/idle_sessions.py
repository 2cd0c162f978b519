"""Segments a second of 20 actors, beside sessions that do not play, and beside none.

    python -m benchmarks.idle_sessions [--runs N] [--quick]

The idle sessions connect first. A learner takes all segments, of 256 steps of CartPole (10 KB), and learns nothing.
Gateway, actors and learner are threads of this process; one thread sends the heartbeats of all idle sessions. `credit
that never lapses` is the same gateway without `Sessions._take_back`. The first segment is of an actor that connects
while the 20 send, from its hello to its acknowledgement.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import zmq

from benchmarks.gateway_durable import TOKEN, make_segment, serving
from benchmarks.result import compare, options, write
from shoal.actor import ActorClient
from shoal.errors import ShoalError
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.gateway import sessions
from shoal.rl.part_specs import GatewaySpec
from shoal.wire import encode
from shoal.wire.messages import Hello, Ping

NUM_ACTIVE, TIMEOUT_S, NONE_S = 20, 20.0, 5.0
# Its name: idle sessions, whether credit lapses.
SIDES = {"alone": (0, True), "180 idle": (180, True), "480 idle": (480, True), "never lapses": (180, False)}


@contextmanager
def idle_sessions(address: str, number: int) -> Iterator[None]:
    """Sessions that send heartbeats, and nothing else."""
    ended, context = threading.Event(), zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2048)
    sockets = [context.socket(zmq.DEALER) for _ in range(number)]
    for index, each in enumerate(sockets):
        each.connect(address)
        each.send(encode(Hello(1, TOKEN, f"idle-{index}", 1)))

    def beat() -> None:
        while not ended.wait(1.0):
            for each in sockets:
                each.send(encode(Ping()))
                while each.poll(0):
                    each.recv_multipart()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(TIMEOUT_S)
        context.destroy(linger=0)


def measure(num_idle: int, lapses: bool, window_s: float) -> tuple[float, float]:
    """Acknowledged segments a second, and the seconds to the first of a new actor."""
    ended, segment = threading.Event(), make_segment()

    def act(client: ActorClient) -> None:
        while not ended.is_set():
            try:
                client.send(segment, timeout_s=1.0)
            except ShoalError:
                continue  # no credit: counted as no segment

    with ExitStack() as opened:
        if not lapses:
            opened.enter_context(mock.patch.object(sessions.Sessions, "_take_back"))
        gateway = opened.enter_context(serving(GatewaySpec(), Ledger(), None))
        opened.enter_context(idle_sessions(gateway.address, num_idle))
        time.sleep(2.0)
        clients = [opened.enter_context(ActorClient(gateway.address, TOKEN, f"a{n}")) for n in range(NUM_ACTIVE)]
        opened.callback(ended.set)
        actors = [threading.Thread(target=act, args=(client,), daemon=True) for client in clients]
        for each in actors:
            each.start()
        time.sleep(2.0)
        before, began_s = sum(each.acknowledged["accepted"] for each in clients), time.perf_counter()
        time.sleep(window_s)
        after, taken_s = sum(each.acknowledged["accepted"] for each in clients), time.perf_counter() - began_s
        began_s, first_s = time.perf_counter(), math.inf
        with ActorClient(gateway.address, TOKEN, "new") as new:
            try:
                new.send(segment, timeout_s=NONE_S)
                first_s = time.perf_counter() - began_s if new.drain(NONE_S) else math.inf
            except ShoalError:
                pass
        ended.set()
        for each in actors:
            each.join(TIMEOUT_S)
    return (after - before) / taken_s, min(first_s, NONE_S)


def main() -> None:
    chosen = options(__doc__, runs=5)
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    firsts: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(chosen.runs):
        for side, setting in SIDES.items():
            rate, first_s = measure(*setting, window_s=1.0 if chosen.quick else 3.0)
            rates[side].append(rate)
            firsts[side].append(first_s)
            print(f"run {number + 1}, {side}: {rate:,.0f} segments/s, the first after {first_s:.3f} s", flush=True)
    note = "gateway, actors and learner in one process; 5 s: none was accepted until then"
    rows = []
    for side, bar in (("180 idle", 0.9), ("480 idle", None), ("never lapses", None)):
        label = "180 idle, credit that never lapses" if side == "never lapses" else side
        about = f"of 20 actors beside others ({label})"
        kind = None if bar is None else "ratio"
        rows.append(
            compare(
                f"segments {about}", "segments/s", "higher", rates[side], rates["alone"], "20 alone", bar, kind, note
            )
        )
        limit, kind = (None, None) if side == "never lapses" else (1.0, "value")
        rows.append(
            compare(
                f"first segment {about}", "s", "lower", firsts[side], firsts["alone"], "20 alone", limit, kind, note
            )
        )
    write("idle_sessions", rows, chosen.results)


if __name__ == "__main__":
    main()
