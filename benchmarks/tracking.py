"""What a dead tracker costs a run: its step time beside that of a run without a tracker.

    python -m benchmarks.tracking [--runs N] [--quick]

A small perceptron is trained in this process: without a tracker, with `track=[mlflow]` whose server's port refuses, and
with one whose server accepts and never answers. The three take turns. A number is the mean step of a run between its
first and its last record: meanwhile the follower starts, loads MLflow's library and calls its server. After each run
its follower is ended, so that it runs beside no other.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import closing
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import shoal
from benchmarks.children import scratch
from benchmarks.result import compare, options, write
from shoal.libs.tracking import processes

STEPS = 30_000
BAR = 1.01
NAMES = {"refused": "its port refuses", "silent": "it accepts and never answers"}
NOTE = "mean of {} steps of a perceptron, with one thread of torch on two cores"


class Perceptron(shoal.Task):
    """Regression of random numbers."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def data(self) -> shoal.Data:
        drawn = torch.Generator().manual_seed(0)
        return shoal.Data(
            train=TensorDataset(torch.randn(4096, 32, generator=drawn), torch.randn(4096, 1, generator=drawn))
        )

    def loss(self, outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(outputs, batch[1])


def measure(server: str | None, steps: int) -> tuple[float, float]:
    """Microseconds of a step, and of this process's processors; the server is at this address, None: no tracker."""
    os.environ["MLFLOW_TRACKING_URI"] = server or ""
    track = ["mlflow"] if server else []
    fields = {"stop": {"steps": steps}, "threads": 1, "log_every_steps": 100}
    before_s = time.process_time()
    result = shoal.fit(Perceptron, track=track, register=False, say=None, **fields)
    processor_s = time.process_time() - before_s
    for process in processes._unfinished:
        process.kill()
        process.wait()
    values = shoal.load_run(result.run_id).list_values(0.0, 1_000_000)
    logged = [each for each in values if each.name == values[0].name]
    step_s = (logged[-1].time - logged[0].time) / (logged[-1].step - logged[0].step)
    return 1e6 * step_s, 1e6 * processor_s / steps


def main() -> None:
    chosen = options(__doc__, runs=9)
    steps = STEPS // 10 if chosen.quick else STEPS
    processes.CLOSE_TIMEOUT_S = 0.0
    found: dict[str, list[tuple[float, float]]] = {}
    with scratch() as folder, closing(socket.create_server(("127.0.0.1", 0))) as silent:
        os.environ["SHOAL_HOME"] = str(Path(folder) / "home")
        with closing(socket.create_server(("127.0.0.1", 0))) as refused:
            ports = {"none": None, "refused": refused.getsockname()[1], "silent": silent.getsockname()[1]}
        servers = {name: port and f"http://127.0.0.1:{port}" for name, port in ports.items()}
        measure(None, steps // 10)
        for run in range(chosen.runs):
            for name in list(servers)[run % 3 :] + list(servers)[: run % 3]:
                found.setdefault(name, []).append(measure(servers[name], steps))
    rows = []
    for index, (what, bar) in enumerate({"step time": BAR, "processor time of a step": None}.items()):
        values = {name: [each[index] for each in pairs] for name, pairs in found.items()}
        rows += [
            compare(
                f"{what}, track=[mlflow], its server dead: {words}",
                "µs",
                "lower",
                values[name],
                values["none"],
                "no tracker",
                bar,
                None if bar is None else "ratio",
                NOTE.format(f"{steps:,}"),
            )
            for name, words in NAMES.items()
        ]
    write("tracking", rows, chosen.results)


if __name__ == "__main__":
    main()
