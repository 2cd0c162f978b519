"""A cluster of hosts that share a bucket and nothing else, its runs, and what they lose with a host.

Called by the tests of such hosts: one of them, `lost`, is slow, so that no run ends before it is lost.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from network import Host, Network, network, start_ray

from bucket_server import BUCKET
from shoal_program import ROOT, Program

LINE = ROOT / "tests/hosts/line.py"
DASHBOARD = "http://127.0.0.1:8265"
RUN_S, CLUSTER_S = 1500.0, 3600.0
STEPS = 300
TRAINING = ["task=line.py:Line", "batch_size=48", f"stop.steps={STEPS}", "checkpoint.every_steps=20"]
TRAINING += ["evaluate.every_steps=100", "log_every_steps=1", "device=cpu"]


class Observer:
    """What a host knows of runs, by tests/hosts/observe_runs.py."""

    def __init__(self, program: Program) -> None:
        self._program, self._number = program, 0

    def observe(self, run_id: str) -> dict[str, Any]:
        self._number += 1
        assert self._program.process.stdin is not None
        self._program.process.stdin.write(f"{self._number} {run_id}\n")
        self._program.process.stdin.flush()
        found: dict[str, Any] = json.loads(self._program.wait_for_line(rf"^{self._number} (.*)")[1])
        return found


@dataclass
class Run:
    """A run that the head has started."""

    program: Program
    observer: Observer
    job: str
    id: str

    def observe(self) -> dict[str, Any]:
        return self.observer.observe(self.id)

    @property
    def step(self) -> int:
        return int(self.observe()["step"])

    @property
    def saved(self) -> list[int]:
        """The steps whose checkpoint is in the store."""
        found: list[int] = self.observe()["saved"]
        return found

    def count_updates(self) -> int:
        """Of a learner."""
        return int(self.observe()["latest"].get("learner/updates", 0))

    def list_events(self, *kinds: str) -> list[tuple[str, dict[str, Any]]]:
        return [(kind, details) for kind, details in self.observe()["events"] if kind in kinds]


@dataclass
class Cluster:
    """`client` is none of it. `spare` comes when `lost` goes, with as many CPUs. trained: a run that has ended."""

    network: Network
    head: Host
    lost: Host
    client: Host
    observer: Observer
    num_cpus: int
    spare: Host | None = None
    trained: str = ""

    @property
    def token(self) -> str:
        return (self.head.files / ".shoal/token").read_text().strip()


@contextmanager
def bucket_cluster(folder: Path, *, num_cpus: int, num_head_cpus: int = 3) -> Iterator[Cluster]:
    """A head, a host that is to be lost, with `num_cpus`, and a client."""
    with network(folder, has_disks=True) as made, ExitStack() as stack:
        bucket = made.add("bucket")
        serving = [sys.executable, str(ROOT / "tests/bucket_server.py"), bucket.address]
        server = stack.enter_context(bucket.start(serving, limit_s=CLUSTER_S, stdin=subprocess.PIPE))
        made.environment |= json.loads(server.wait_for_line(r"^\{.*")[0]) | {"SHOAL_STORE": f"s3://{BUCKET}/shoal"}
        head, lost, client = map(made.add, ("head", "lost", "client"))
        shutil.copytree(ROOT / "jobs", head.files / "project/jobs")
        shutil.copy(LINE, head.files / "project")
        start_ray(head, head, num_cpus=num_head_cpus)
        start_ray(lost, head, num_cpus=num_cpus)
        observing = [sys.executable, str(ROOT / "tests/hosts/observe_runs.py")]
        observer = Observer(stack.enter_context(head.start(observing, limit_s=CLUSTER_S, stdin=subprocess.PIPE)))
        yield Cluster(made, head, lost, client, observer, num_cpus)


def begin(stack: ExitStack, cluster: Cluster, *words: str) -> Program:
    """`shoal run`, of a user of the head."""
    command = ["shoal", "run", *words, "--address", DASHBOARD]
    return stack.enter_context(cluster.head.start(command, limit_s=RUN_S))


def find(program: Program, cluster: Cluster) -> Run:
    """The run, once it has a record."""
    job = program.wait_for_line(r"^job ([\w-]+) on")[1]
    return Run(program, cluster.observer, job, program.wait_for_line(r"^run ([\w-]+):")[1])


@dataclass
class Lost:
    """What a run has lost with a host: its newest step, or update, before; what it has gone on from; what was saved."""

    newest: int
    restored: int
    saved: int

    def check(self, name: str) -> None:
        sys.stdout.write(f"{name}: lost {self.newest - self.restored} of {self.newest}, saved was {self.saved}\n")
        assert self.saved <= self.restored <= self.newest, (name, self)


def lose_host(cluster: Cluster, runs: Mapping[str, Run]) -> dict[str, int]:
    """The slow host goes, and with it its disk; an empty one comes. Returns the step of each run that was saved."""
    for run in runs.values():
        is_ready = partial(lambda run: run.saved and run.step > 50, run)
        run.program.wait_until(is_ready, "steps, and a checkpoint in the store")
    saved = {name: run.saved[-1] for name, run in runs.items()}
    cluster.network.power_off(cluster.lost)
    assert not cluster.lost.files.exists()
    cluster.spare = cluster.network.add("spare")
    start_ray(cluster.spare, cluster.head, num_cpus=cluster.num_cpus)
    return saved
