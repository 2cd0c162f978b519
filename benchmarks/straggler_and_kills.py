"""LeNet on Fashion-MNIST to 88% with a straggler, a killed worker and a killed server, beside an undisturbed run.

    python -m benchmarks.straggler_and_kills [--runs N] [--quick]

Four workers, steps of 64 images that also sleep 30 ms. Ours: free-running workers and two servers on one host. One
worker sleeps four times as long; another worker and a server are killed with -9 at steps that the seed chooses. The
peer is the same run of four full workers that nothing disturbs: what the straggler leaves is 3.25 workers of 4, so no
ratio below 1.23 can be had. Beside it torchft's DiLoCo (20 local steps) with the same straggler and the same death of a
worker, which begins anew at once; its lighthouse waits for all replicas that are alive. Seconds are those between the
first step and the evaluation that meets the target, evaluations of a quarter of an epoch included.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.children import ROOT, TORCHFT, Child, ChildFailed, scratch
from benchmarks.result import Row, compare, options, write
from shoal.libs.asynchronous.replicas import ForkedProcess, fit_replicas
from shoal.train.spec import TrainSpec

TASK = f"{Path(__file__).parent / 'ours' / 'sleeping_lenet.py'}:SleepingLeNet"
TARGET, BAR, TIMEOUT_S = 0.88, 1.4, 600.0
NUM_WORKERS, STEP_S, SLOWEST = 4, 0.03, 4.0
FIRST_KILL, LAST_KILL = 60, 700  # steps of 256 images of the whole group


class Processes:
    """Starts the processes of a run, and kills them by name."""

    def __init__(self) -> None:
        self._running: dict[str, ForkedProcess] = {}

    def start(self, name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> ForkedProcess:
        self._running[name] = ForkedProcess(name, target, arguments)
        return self._running[name]

    def kill(self, name: str) -> None:
        os.kill(self._running[name].pid, 9)


class KillingLog:
    """An event log that kills processes at the chief's steps, and keeps when the target was met."""

    def __init__(self, processes: Processes, kills: Mapping[str, int], target: float) -> None:
        self._processes, self._kills, self._target = processes, dict(kills), target
        self._began_s = 0.0
        self.seconds: float | None = None
        self.events: list[tuple[str, dict[str, Any]]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._began_s = self._began_s or time.perf_counter()
        for name in [each for each, at in self._kills.items() if at <= step]:
            self._processes.kill(name)
            del self._kills[name]
        if self.seconds is None and values.get("validation/accuracy", 0.0) >= self._target:
            self.seconds = time.perf_counter() - self._began_s

    def record_event(self, kind: str, /, **details: Any) -> None:
        self.events.append((kind, details))

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """Not kept."""

    def flush(self) -> None:
        """Nothing is waiting."""

    @property
    def are_all_dead(self) -> bool:
        return not self._kills


def choose_kills(seed: int) -> dict[str, int]:
    """The step at which each process is killed."""
    random = np.random.default_rng(seed)
    worker, server = random.integers(1, 3), random.integers(0, 2)
    first, second = random.integers(FIRST_KILL, LAST_KILL, 2)
    return {f"worker {worker}": int(first), f"server {server}": int(second)}


def measure(seed: int, target: float, kills: Mapping[str, int], slowest: float) -> tuple[float, dict[str, Any]]:
    """Seconds to the target, and the run's event `staleness`."""
    spec = TrainSpec.parse(
        {
            "task": TASK, "args": {"step_s": STEP_S, "slowest": slowest}, "seed": seed, "threads": 1,
            "workers": NUM_WORKERS, "batch_size": 64 * NUM_WORKERS, "log_every_steps": 5,
            "optimizer": {"name": "adam", "learning_rate": 1e-3}, "schedule": {"name": "constant", "warmup": 0},
            "sync": {"kind": "parameter_server", "servers": 2, "staleness": None},
            "evaluate": {"every_epochs": 0.25}, "stop": {"target": f"accuracy>={target}", "epochs": 20},
        }
    )  # fmt: skip
    processes = Processes()
    log = KillingLog(processes, kills, target)
    with scratch() as folder:
        fit_replicas(spec, "benchmark", folder, log, lambda: False, start=processes.start)
    if log.seconds is None or not log.are_all_dead:
        raise ChildFailed(f"the target was missed, or met before the kills {kills}")
    [updates] = [details for kind, details in log.events if kind == "staleness"]
    return log.seconds, updates


def measure_torchft(seed: int, target: float, kill_at: int) -> float:
    """Seconds to the target of replica 0, while replica 3 is slow and replica 1 is killed once.

    kill_at: a step of 256 images
    """
    address = f"http://127.0.0.1:{_find_free_port()}"
    with scratch() as folder, ExitStack() as closing:
        words = [
            str(TORCHFT / "bin/torchft_lighthouse"),
            "--min_replicas",
            "1",
            "--bind",
            address.removeprefix("http://"),
        ]
        words += ["--heartbeat_timeout_ms", "1000", "--quorum_tick_ms", "20"]
        closing.enter_context(Child(words, folder, goodbye_s=0.0))

        def start(index: int) -> Child:
            step_s = STEP_S * (SLOWEST if index == NUM_WORKERS - 1 else 1.0)
            script = [str(TORCHFT / "bin/python"), str(ROOT / "benchmarks/peers/torchft_diloco.py")]
            words = [*script, *map(str, (index, NUM_WORKERS, address, step_s, target, seed))]
            return closing.enter_context(Child(words, folder, {"RUST_LOG": "error"}, goodbye_s=0.0))

        children = [start(index) for index in range(NUM_WORKERS)]
        children[0].answer(120.0)
        began_s, is_killed = time.perf_counter(), False
        while time.perf_counter() - began_s < TIMEOUT_S:
            said = children[0].answer(120.0)
            if not is_killed and said["step"] >= kill_at:
                children[1].process.kill()
                start(1)
                is_killed = True
            if said["accuracy"] >= target:
                return time.perf_counter() - began_s
        raise ChildFailed(f"torchft's DiLoCo has not met {target} in {TIMEOUT_S} s")


def _find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def main() -> None:
    chosen = options(__doc__, runs=3)
    target = 0.8 if chosen.quick else TARGET
    disturbed, undisturbed, torchft, notes = [], [], [], []
    for seed in range(chosen.runs):
        kills = choose_kills(seed) if not chosen.quick else {"worker 1": 60, "server 0": 120}
        seconds, updates = measure(seed, target, kills, SLOWEST)
        disturbed.append(seconds)
        notes.append(f"seed {seed}: {kills}, {updates['lost']} updates lost")
        undisturbed.append(measure(seed, target, {}, 1.0)[0])
        torchft.append(measure_torchft(seed, target, next(iter(kills.values()))))
        print(notes[-1], disturbed[-1], undisturbed[-1], torchft[-1], flush=True)
    title = f"LeNet to {target:.0%}, one of four workers 4 times slower, a worker and a server killed"
    rows: list[Row] = [
        compare(title, "s", "lower", disturbed, undisturbed, "undisturbed", BAR, "ratio", "; ".join(notes)),
        compare(f"{title}: beside DiLoCo", "s", "lower", disturbed, torchft, "torchft's DiLoCo"),
    ]
    write("straggler_and_kills", rows, chosen.results)


if __name__ == "__main__":
    main()
