"""A gateway that infers for client processes on sockets, without a learner: segments are taken and acknowledged.

    python -m benchmarks.ours.remote_inference_server NUM_CLIENTS SECONDS CLIENT [PROFILE]

CLIENT: `bare` speaks the protocol with pyzmq and msgpack alone, `python` is `shoal.connect(..., inference="remote")`.
PROFILE: a file for cProfile's numbers of the gateway's thread. Prints one JSON object: actions a second, and
percentiles of the latency in milliseconds.
"""

from __future__ import annotations

import cProfile
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgpack
import numpy as np
import zmq

import shoal
from shoal.rl.experience.queue import BatchRequest, ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.gateway.gateway import Gateway
from shoal.rl.gateway.state import GatewaySetting
from shoal.rl.part_specs import GatewaySpec
from shoal.rl.spec import policy_spec
from shoal.weights import WeightSnapshot, WeightStore
from shoal.wire import ExperienceSpec, TensorSpec

WARM_UP_S = 2.0
TOKEN = "benchmark"
EPISODE_STEPS = 200
EXPERIENCE = ExperienceSpec(TensorSpec("float32", (4,)), TensorSpec("int64", (), 0, 1), 256, policy_spec((64, 64)))


def make_weights() -> WeightSnapshot:
    random = np.random.default_rng(0)
    sizes = [(64, 4), (64, 64), (2, 64)]
    arrays = {}
    for (weight, bias), shape in zip(EXPERIENCE.policy.layers, sizes, strict=True):
        arrays[weight] = random.normal(size=shape).astype(np.float32) / 8
        arrays[bias] = np.zeros(shape[0], np.float32)
    return WeightSnapshot.of(1, arrays)


def make_bare_client(address: str, number: int) -> Callable[[np.ndarray, int], None]:
    """A function of (observation, step in all): sends one observation and waits for its action."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(address)
    hello = {"kind": "hello", "protocol": 1, "token": TOKEN, "actor_id": f"bare-{number}", "incarnation": 1}
    socket.send(msgpack.packb({**hello, "inference": "remote"}))
    socket.recv_multipart()

    def act(observation: np.ndarray, count: int) -> None:
        episode, step = divmod(count, EPISODE_STEPS + 1)
        header = {"kind": "act", "episode": episode, "step": step, "reward": 1.0, "terminated": step == EPISODE_STEPS}
        socket.send_multipart([msgpack.packb(header), observation.tobytes()])
        answer = msgpack.unpackb(socket.recv_multipart()[0])
        assert not answer["reason"], answer

    return act


def make_python_client(address: str, number: int) -> Callable[[np.ndarray, int], None]:
    """The same through the public client."""
    actor = shoal.connect(address, token=TOKEN, actor_id=f"python-{number}", inference="remote")

    def act(observation: np.ndarray, count: int) -> None:
        if count % (EPISODE_STEPS + 1) == EPISODE_STEPS:
            actor.end_episode(observation)
        else:
            actor.act(observation)
            actor.reward(1.0)

    return act


CLIENTS = {"bare": make_bare_client, "python": make_python_client}


def play(kind: str, number: int, address: Any, begin_at: float, seconds: float, results: Any) -> None:
    """Ask one action after another; puts the latencies of those within the window."""
    act = CLIENTS[kind](address.get(), number)
    random = np.random.default_rng(number)
    latencies, count, ends_at = [], 0, begin_at + seconds
    while (asked_at := time.monotonic()) < ends_at:
        act(random.random(4, np.float32), count)
        count += 1
        if asked_at >= begin_at:
            latencies.append(time.monotonic() - asked_at)
    results.put(latencies)


def consume(queue: ExperienceQueue, stopping: threading.Event) -> None:
    while not stopping.is_set():
        batch = queue.take("consumer", BatchRequest(2048, 4096, 48, 0.1))
        if batch is not None:
            queue.acknowledge(batch.lease_id, [None] * len(batch.lengths))


class ProfiledGateway(Gateway):
    """Profiles the thread that owns the socket."""

    profile_path = ""

    def _serve(self) -> None:
        profile = cProfile.Profile()
        profile.runcall(super()._serve)
        profile.dump_stats(self.profile_path)


def main(num_clients: int, seconds: float, kind: str, profile_path: str = "") -> None:
    context = multiprocessing.get_context("fork")
    addresses, results = context.Queue(), context.Queue()
    begin_at = time.monotonic() + WARM_UP_S
    players = [
        context.Process(target=play, args=(kind, number, addresses, begin_at, seconds, results), daemon=True)
        for number in range(num_clients)
    ]
    for each in players:  # before there are threads
        each.start()
    store, ledger = WeightStore(), Ledger()
    store.publish(make_weights())
    queue = ExperienceQueue(96, ledger)
    ProfiledGateway.profile_path = profile_path
    setting = GatewaySetting(GatewaySpec(), EXPERIENCE, TOKEN, "benchmark")
    gateway = (ProfiledGateway if profile_path else Gateway)(setting, queue, store)
    gateway.start()
    stopping = threading.Event()
    consumer = threading.Thread(target=consume, args=(queue, stopping))
    consumer.start()
    for _ in players:
        addresses.put(gateway.address)
    latencies = sorted(latency for _ in players for latency in results.get(timeout=seconds + 60))
    for each in players:
        each.join()
    counts = gateway.stats()["remote_inference"]
    stopping.set()
    consumer.join()
    store.close()
    gateway.close()
    totals = ledger.get_totals()
    assert totals.is_balanced, totals
    p50_s, p99_s = (latencies[int(share * len(latencies))] for share in (0.5, 0.99))
    found = {"rate": len(latencies) / seconds, "p50_ms": 1e3 * p50_s, "p99_ms": 1e3 * p99_s}
    print(json.dumps({**found, "rows_a_batch": counts["actions"] / counts["batches"]}))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
