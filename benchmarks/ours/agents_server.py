"""A gateway with WebSocket, and a real learner in a process of its own, for a game of many agents.

    python -m benchmarks.ours.agents_server SECONDS [PROFILE] -- GAME ...

GAME: a command, to which the port and the token are added; it prints what it has measured as JSON. PROFILE: a file for
cProfile's numbers of the gateway's thread. Prints one JSON object: what the game has, the processor time of the gateway
for each step, in microseconds, of its thread and of its whole process, and the account of the segments.
"""

from __future__ import annotations

import cProfile
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
from gymnasium import spaces

from shoal.rl.experience.queue import ExperienceQueue
from shoal.rl.experience.segment_ledger import LEDGER_NAME, Ledger
from shoal.rl.gateway.gateway import Gateway
from shoal.rl.gateway.state import GatewaySetting
from shoal.rl.learner import Learner
from shoal.rl.spec import RLSpec, experience_spec
from shoal.weights import WeightStore

TOKEN = "benchmark"
SPEC = RLSpec.parse(
    {
        "env": "catch",
        "gateway": {"websocket": 0, "queue_capacity": 1024},
        "segment_length": 64,
        "algorithm": {"name": "impala", "learning_rate": 0.005},
    }
)
EXPERIENCE = experience_spec(spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(3), SPEC)


class Manager(BaseManager):
    """Lets the learner's process call the queue and the weight store of the gateway's."""


def learn(address: Any, authkey: bytes, folder: Path) -> None:
    """The learner's process, until it is terminated."""
    for name in ("queue", "store"):
        Manager.register(name)
    manager = Manager(address, authkey)
    manager.connect()
    Learner(SPEC, EXPERIENCE, manager.queue(), manager.store(), folder).run_as_thread()  # type: ignore[attr-defined]


class MeasuredGateway(Gateway):
    """Notes the processor time of the thread that owns the sockets, and its profile where a file for it is given."""

    profile_path, serving_s = "", 0.0

    def _serve(self) -> None:
        if self.profile_path:
            profile = cProfile.Profile(time.thread_time)
            profile.runcall(super()._serve)
            profile.dump_stats(self.profile_path)
        else:
            super()._serve()
        MeasuredGateway.serving_s = time.thread_time()


def main(seconds: float, game: list[str], profile_path: str = "") -> None:
    MeasuredGateway.profile_path = profile_path
    with tempfile.TemporaryDirectory() as folder:
        ledger, store = Ledger(Path(folder) / LEDGER_NAME), WeightStore()
        queue = ExperienceQueue(SPEC.queue_capacity, ledger)
        Manager.register("queue", lambda: queue)
        Manager.register("store", lambda: store)
        server = Manager(("127.0.0.1", 0), TOKEN.encode()).get_server()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        arguments = server.address, TOKEN.encode(), Path(folder) / "checkpoints"
        learner = multiprocessing.get_context("spawn").Process(target=learn, args=arguments, daemon=True)
        learner.start()
        gateway = MeasuredGateway(GatewaySetting(SPEC.applied_gateway, EXPERIENCE, TOKEN), queue, store)
        gateway.start()
        assert gateway.listener is not None
        port = str(gateway.listener.port)
        began_s = time.process_time()
        done = subprocess.run(
            [*game, port, TOKEN],
            stdout=subprocess.PIPE,
            text=True,
            timeout=seconds + 60,
            check=True,
        )
        process_s, steps, consumed = (
            time.process_time() - began_s,
            gateway.stats()["steps"],
            ledger.get_totals().consumed,
        )
        times = psutil.Process(learner.pid).cpu_times()
        learner.terminate()
        learner.join()
        gateway.close()
        totals = ledger.get_totals()
        ledger.close()
    assert totals.is_balanced, totals
    found = json.loads(done.stdout)
    found |= {"learner_us": 1e6 * (times.user + times.system) / steps}
    found |= {"thread_us": 1e6 * MeasuredGateway.serving_s / steps, "process_us": 1e6 * process_s / steps}
    print(json.dumps({**found, "counted_steps": steps, "learnt_share": consumed / totals.received}), flush=True)
    os._exit(0)  # the manager's thread has no end


if __name__ == "__main__":
    at = sys.argv.index("--")
    main(float(sys.argv[1]), sys.argv[at + 1 :], *sys.argv[2:at])
