"""A pull and a push of 15 MB between a worker and a parameter server on one host, beside a bare Ray actor.

    python -m benchmarks.pull_push [--runs N] [--quick]

Ours is the synchronizer of a real worker against a real server and controller, each in a process of its own. The peer
is a Ray actor that holds one flat NumPy array: `push(gradient)` and `pull()` of 15 MB through the object store. The
peer is given no model: its gradient is flat already, and what it pulls stays where Ray puts it. Both take turns. The
first row has the bytes alone: each side pauses between push and pull, while ours applies. In the second row both apply
(SGD, `weights -= rate * gradient`) and no side pauses.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import ray
import torch
from torch import nn
from torch.optim import SGD

from benchmarks.children import scratch
from benchmarks.result import Row, compare, options, write
from shoal.libs.asynchronous.clock import Clock
from shoal.libs.asynchronous.config import ParameterServerConfig
from shoal.libs.asynchronous.controller import ControllerSetting
from shoal.libs.asynchronous.parameter_server.controller import ServerController
from shoal.libs.asynchronous.parameter_server.server import ParameterServer
from shoal.libs.asynchronous.parameter_server.server_service import ServerService
from shoal.libs.asynchronous.parameter_server.worker import ParameterServerSync
from shoal.sync.synchronizer import Connection

RATE, TIMEOUT_S, PAUSE_S, WARM_UP = 0.01, 60.0, 0.03, 5
BAR = 0.6


def make_optimizer() -> SGD:
    """Of six tensors with 15 MB."""
    network = nn.Sequential(nn.Linear(1200, 1200), nn.Linear(1200, 1200), nn.Linear(1200, 722))
    return SGD(network.parameters(), RATE)


def serve(folder: str, spec: ParameterServerConfig) -> None:
    """The process of the server."""
    torch.set_num_threads(1)
    server, file = ParameterServer(0, make_optimizer(), spec, 1), Path(folder, "server-0.safetensors")
    ServerService(f"ipc://{folder}/server", server, f"ipc://{folder}/controller", TIMEOUT_S, file).start()
    threading.Event().wait()


def control(folder: str, spec: ParameterServerConfig) -> None:
    """The process of the controller."""
    run = ControllerSetting(f"ipc://{folder}/controller", [f"ipc://{folder}/server"], 1, None, TIMEOUT_S)
    ServerController(run, Clock(1), spec).start()
    threading.Event().wait()


class WeightActor:
    """The peer."""

    def __init__(self, size: int) -> None:
        self._weights = np.zeros(size, np.float32)

    def push(self, gradient: np.ndarray, is_applied: bool) -> None:
        if is_applied:
            self._weights -= RATE * gradient

    def pull(self) -> np.ndarray:
        return self._weights


def measure_ms(push: Callable[[], object], pull: Callable[[], object], pause_s: float, num_turns: int) -> float:
    """The median over turns of a push and a pull, without the pause between them."""
    turns = []
    for _ in range(WARM_UP + num_turns):
        began_s = time.perf_counter()
        push()
        pushed_s = time.perf_counter()
        time.sleep(pause_s)
        pulling_s = time.perf_counter()
        pull()
        turns.append(time.perf_counter() - pulling_s + pushed_s - began_s)
        time.sleep(pause_s)
    return 1e3 * statistics.median(turns[WARM_UP:])


def main() -> None:
    chosen = options(__doc__, runs=7)
    num_turns = 10 if chosen.quick else 40
    torch.set_num_threads(1)
    sides = ("ours", "ray")
    found: dict[tuple[str, bool], list[float]] = {(side, wait): [] for side in sides for wait in (True, False)}
    optimizer = make_optimizer()
    parameters = optimizer.param_groups[0]["params"]
    for each in parameters:
        each.grad = torch.randn_like(each) / 1e3
    flat = torch.cat([each.grad.reshape(-1) for each in parameters]).numpy()
    with scratch() as folder, ExitStack() as closing:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
        closing.callback(ray.shutdown)
        actor = ray.remote(WeightActor).remote(len(flat))
        plain = connect(folder / "plain", ParameterServerConfig(), optimizer, closing)
        for run in range(chosen.runs):
            for wait in (True, False):
                pause_s = PAUSE_S if wait else 0.0
                calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
                    "ours": (plain.apply_gradients, plain.before_step),
                    "ray": (
                        lambda: ray.get(actor.push.remote(flat, not wait)),  # noqa: B023 - called in this turn
                        lambda: ray.get(actor.pull.remote()),
                    ),
                }
                for side in sides[:: 1 if run % 2 else -1]:
                    found[side, wait].append(measure_ms(*calls[side], pause_s, num_turns))
    for key, values in found.items():
        print(key, [round(each, 2) for each in values], flush=True)
    name, size = "pull + push of 15 MB on one host", f"{4 * len(flat):,} bytes each way"
    rows: list[Row] = [
        compare(name, "ms", "lower", found["ours", True], found["ray", True], "a bare Ray actor", BAR, "ratio", size),
        compare(
            f"{name}, with the step of SGD",
            "ms",
            "lower",
            found["ours", False],
            found["ray", False],
            "a bare Ray actor",
            note="the actor: weights -= rate * gradient",
        ),
    ]
    write("pull_push", rows, chosen.results)


def connect(folder: Path, spec: ParameterServerConfig, optimizer: SGD, closing: ExitStack) -> ParameterServerSync:
    """A worker of a controller and a server that begin here, each in a process of its own."""
    folder.mkdir()
    context = multiprocessing.get_context("spawn")
    for target in (control, serve):
        process = context.Process(target=target, args=(str(folder), spec), daemon=True)
        process.start()
        closing.callback(process.join)
        closing.callback(process.terminate)
    connection = Connection(0, 1, f"ipc://{folder}/controller", [f"ipc://{folder}/server"], TIMEOUT_S)
    sync = ParameterServerSync(optimizer, spec, connection)
    closing.callback(sync.close)
    sync.begin(0)
    return sync


if __name__ == "__main__":
    main()
