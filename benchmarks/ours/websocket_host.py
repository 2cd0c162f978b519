"""A gateway that speaks WebSocket and ZeroMQ, in its process, with a consumer in place of a learner.

    python -m benchmarks.ours.websocket_host FOLDER

Says its addresses. Each step's reward is a number of its own: the consumer appends those that it takes to FOLDER/learnt
before it acknowledges them. When asked, it says what the ledger has, its memory, and the processor time of its thread.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil

from benchmarks.ours.remote_inference_server import EXPERIENCE, TOKEN, make_weights
from benchmarks.talk import commands, say
from shoal.rl.experience.queue import BatchRequest, ExperienceQueue
from shoal.rl.experience.segment_ledger import LEDGER_NAME, Ledger
from shoal.rl.gateway.gateway import Gateway
from shoal.rl.gateway.listener import format_websocket_address
from shoal.rl.gateway.state import GatewaySetting
from shoal.rl.part_specs import GatewaySpec
from shoal.weights import WeightStore

SPEC = {"websocket": 0, "timeout_s": 6.0}


def consume(queue: ExperienceQueue, path: Path, stopping: threading.Event) -> None:
    with path.open("ab", buffering=0) as file:
        while not stopping.is_set():
            batch = queue.take("consumer", BatchRequest(256, 4096, 48, 0.1))
            if batch is not None:
                file.write(np.asarray(batch.rewards, np.float32).tobytes())
                queue.acknowledge(batch.lease_id, [None] * len(batch.lengths))


def main(folder: Path) -> None:
    store, ledger, stopping = WeightStore(), Ledger(folder / LEDGER_NAME), threading.Event()
    store.publish(make_weights())
    queue = ExperienceQueue(96, ledger)
    gateway = Gateway(GatewaySetting(GatewaySpec.parse(SPEC), EXPERIENCE, TOKEN, "benchmark"), queue, store)
    gateway.start()
    consumer = threading.Thread(target=consume, args=(queue, folder / "learnt", stopping))
    consumer.start()
    process = psutil.Process()
    say(websocket=format_websocket_address(gateway.listener, "127.0.0.1"), tcp=gateway.address)
    for _ in commands():
        totals, used = ledger.get_totals(), process.cpu_times()
        say(
            received=totals.received,
            is_balanced=totals.is_balanced,
            rss_mb=process.memory_info().rss / 1e6,
            cpu_s=used.user + used.system,
            connections=len(process.net_connections("tcp")),
        )
    stopping.set()
    consumer.join()
    store.close()
    gateway.close(finished=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
