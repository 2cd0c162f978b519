"""Trains a run of each kind of replicas on this host's cluster, all at once, until each has gone on without a host.

    python train_replicas.py SHARED OWN     two folders, of which no other host has the second

Says "training" once every run has taken steps with a worker on each of two hosts. Then one of these is to be lost. A
run ends when it has noticed, and the chief has taken STEPS_AFTER further steps. The last line is JSON: what each has
logged. Workers find this folder on $PYTHONPATH.
"""

import json
import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.cluster.job_main import connect, disconnect
from shoal.libs.asynchronous.ray_processes import RayProcesses
from shoal.libs.asynchronous.replicas import fit_replicas
from shoal.runs.record.event_log import EventLog
from shoal.train.spec import TrainSpec
from train_task import Toy

STEPS_BEFORE, STEPS_AFTER = 5, 10
KINDS: dict[str, dict[str, Any]] = {
    "elastic": {"workers": [1, 2]},
    "diloco": {"workers": 2, "sync": {"kind": "diloco", "every": 4}},
    # The second server is on the host that is lost, and its state where all find it.
    "parameter_server": {"workers": 2, "sync": {"kind": "parameter_server", "servers": 2}},
}


class Placed(Toy):
    """Each worker leaves a file `KIND@HOST` in `marks`."""

    def __init__(self, marks: str, kind: str) -> None:
        super().__init__(dropout=0.0, step_s=0.05)
        self._mark = Path(marks) / f"{kind}@{os.uname().nodename}"

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self._mark.touch()
        return super().loss(outputs, batch)


class Run(EventLog):
    """One of them, and its event log."""

    def __init__(self, kind: str, marks: Path, folder: Path) -> None:
        super().__init__()
        self._kind = kind
        self._marks = marks
        self._folder = folder
        self._lost_at: int | None = None
        self.is_training = threading.Event()
        self.steps: list[int] = []
        folder.mkdir()

    def train(self) -> dict[str, Any]:
        base = {"batch_size": 32, "log_every_steps": 1, "stop": {"steps": 1_000_000}, "threads": 1, "device": "cpu"}
        args = {"marks": str(self._marks), "kind": self._kind}
        spec = TrainSpec.parse({**base, "task": f"{__file__}:Placed", "args": args, **KINDS[self._kind]})
        processes = RayProcesses(spec)
        words = spec, "run", self._folder, self, self._is_over, processes.start
        outcome = fit_replicas(*words, host=processes.find_address())
        return {"steps": self.steps, "events": self.events, "ended": [outcome.reason, outcome.steps]}

    def _is_over(self) -> bool:
        return self._lost_at is not None and self.steps[-1] >= self._lost_at + STEPS_AFTER

    def log(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        if "train/loss" in values:
            self.steps.append(step)
        if step >= STEPS_BEFORE and len(list(self._marks.glob(f"{self._kind}@*"))) > 1:
            self.is_training.set()

    def record_event(self, kind: str, /, **details: object) -> None:
        super().record_event(kind, **details)
        if kind == "worker_lost":
            self._lost_at = self.steps[-1]


def main(shared: Path, own: Path) -> None:
    os.environ["RAY_ADDRESS"] = "auto"
    connect()
    runs = {
        kind: Run(kind, shared, (shared if kind == "parameter_server" else own) / f"run of {kind}") for kind in KINDS
    }
    with ThreadPoolExecutor(len(runs)) as pool:
        ended = {kind: pool.submit(run.train) for kind, run in runs.items()}
        for kind, run in runs.items():
            while not run.is_training.wait(0.1):
                assert not ended[kind].done(), ended[kind].result()
        sys.stdout.write("training\n")
        sys.stdout.flush()
        found = {kind: future.result() for kind, future in ended.items()}
    disconnect()
    sys.stdout.write(f"{json.dumps(found, default=str)}\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
