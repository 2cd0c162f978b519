"""Hosts that share a bucket and nothing else: runs that lose one with its disk, and what the others have then.

One of them, `lost`, is slow, so that no run ends before it is lost.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from network import Host, Network, network, start_ray, why_none

from bucket_server import BUCKET
from shoal_program import ROOT, STATE_S, Program

LINE = ROOT / "tests/hosts/line.py"
DASHBOARD = "http://127.0.0.1:8265"
CLUSTER = "--address", DASHBOARD, "--timeout-s", f"{STATE_S:g}"
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
    """`client` is none of it. `spare` comes when `lost` goes, with as many CPUs."""

    network: Network
    head: Host
    lost: Host
    client: Host
    observer: Observer
    num_cpus: int
    spare: Host | None = None

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


pytestmark = [pytest.mark.skipif(bool(why_none()), reason=why_none()), pytest.mark.timeout(3600), pytest.mark.soak]
SERVERS = ["workers=2", "sync.kind=parameter_server", "sync.servers=2"]
LOOP = ["gateway.host=0.0.0.0", "gateway.curve=true", "endpoint.num_cpus=0.3", "learner.num_cpus=4"]
LOOP += ["target_return=1000", "max_wall_s=3600", "learner.checkpoint_every_s=1"]  # the target is beyond reach


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with bucket_cluster(tmp_path_factory.mktemp("disks"), num_cpus=7) as made:
        yield made


def check_restored(name: str, run: Run, saved: int) -> None:
    """It ends, after it went on from a checkpoint that was not older than `saved`."""
    assert run.program.wait(STATE_S) == 0
    [(_, lost), (_, restored), (_, stopped)] = run.list_events("workers_lost", "restored", "stopped")
    Lost(lost["step"], restored["step"], saved).check(name)
    assert stopped["step"] == STEPS


def test_hosts_see_nothing_of_each_other(cluster: Cluster) -> None:
    hosts = [cluster.head, cluster.lost, cluster.client]
    for host in hosts:
        host.run("bash", "-c", f"hostname > {host.home}/mine; hostname > /dev/shm/mine; hostname > /tmp/ray/mine")
    for host in hosts:
        assert host.run("cat", f"{host.home}/mine", "/dev/shm/mine", "/tmp/ray/mine").split() == 3 * [host.name]
        assert not (cluster.network.folder / "user").exists()
        with pytest.raises(AssertionError) as refused:
            host.run("touch", str(ROOT / "mine"))
        assert "Read-only file system" in "".join(refused.value.__notes__)


def test_runs_go_on_from_their_checkpoints_when_a_host_is_lost_with_its_disk(cluster: Cluster) -> None:
    """The learner fits on that host alone, and the ranks on no single one. Nothing says that it is gone."""
    with ExitStack() as stack:
        looping = begin(stack, cluster, "actor_learner", *LOOP)
        servers = find(begin(stack, cluster, "train", *TRAINING, *SERVERS), cluster)
        acting = [sys.executable, *shlex.split(looping.wait_for_line(".*--connect.*")[0])[1:]]
        idle = ["nice", "-n", "19"]
        stack.enter_context(cluster.client.start([*idle, *acting], {"SHOAL_TOKEN": cluster.token}, RUN_S))
        servers.program.wait_until(lambda: servers.step > 0, "workers of the servers, which leave one CPU on each host")
        ranks = find(begin(stack, cluster, "train", *TRAINING, "workers=3", "parallel=fsdp", "name=line"), cluster)
        runs = {"parameter_server": servers, "fsdp": ranks, "learner": find(looping, cluster)}
        saved = lose_host(cluster, runs)
        learner = runs.pop("learner")
        learner.program.wait_until(lambda: learner.list_events("learner_restarted"), "another learner")
        for name, run in runs.items():
            check_restored(name, run, saved[name])
        [(_, lost)] = learner.list_events("learner_restarted")
        Lost(lost["updates"], lost["restored_updates"], saved["learner"]).check("learner")
        learner.program.wait_until(lambda: learner.count_updates() > lost["updates"], "what was lost, learnt again")
        cluster.head.run("bash", "-c", f". ~/shoal-host.env; ray job stop --address {DASHBOARD} {learner.job}")
        assert learner.program.wait() != 0
        [(_, segments)] = learner.list_events("accounting")
        assert segments["received"] == segments["consumed"] + segments["queued"] + sum(segments["dropped"].values())
        assert segments["balanced"]


def test_a_run_goes_on_when_the_host_of_its_gateway_and_its_learner_is_lost(tmp_path: Path) -> None:
    """The head has no CPU. What was acknowledged is learnt on another host, and the actor follows there."""
    with bucket_cluster(tmp_path, num_cpus=6, num_head_cpus=0) as made, ExitStack() as stack:
        words = [*LOOP, "gateway.durable=store", "learner.num_cpus=1", "learner.max_batch_steps=512"]
        looping = begin(stack, made, "actor_learner", *words)
        acting = [sys.executable, *shlex.split(looping.wait_for_line(".*--connect.*")[0])[1:]]
        actor = stack.enter_context(made.client.start(acting, {"SHOAL_TOKEN": made.token}, RUN_S))
        run = find(looping, made)
        lose_host(made, {"learner": run})
        run.program.wait_until(lambda: run.list_events("learner_restarted"), "another learner")
        [(_, lost)] = run.list_events("learner_restarted")
        run.program.wait_until(lambda: run.count_updates() > lost["updates"] + 100, "what was lost, learnt again")
        assert run.list_events("gateway_moved")
        assert "the gateway has moved" in actor.said
        made.head.run("bash", "-c", f". ~/shoal-host.env; ray job stop --address {DASHBOARD} {run.job}")
        [(_, segments)] = run.list_events("accounting")
        sys.stdout.write(f"accounting: {segments}\n")
        assert segments["balanced"]
        assert segments["dropped"].get("stale_consumption", 0) < 0.05 * segments["consumed"]


def test_ranks_that_keep_their_weights_whole_go_on_from_their_checkpoint(tmp_path: Path) -> None:
    with bucket_cluster(tmp_path, num_cpus=2, num_head_cpus=2) as made, ExitStack() as stack:
        run = find(begin(stack, made, "train", *TRAINING, "workers=3", "parallel=ddp"), made)
        check_restored("ddp", run, lose_host(made, {"ddp": run})["ddp"])


def test_a_host_serves_what_another_has_trained(cluster: Cluster) -> None:
    """The replica fits on the host that came last."""
    said = cluster.head.run("shoal", "serve", "deploy", "line", "endpoint.num_cpus=3.5", *CLUSTER)
    url = re.search(r"is ready at ([^\s,]+)", said)
    assert url, said
    [replica] = json.loads(cluster.head.run("shoal", "serve", "status", "line", "--json"))["replicas"]
    assert (replica["host"], replica["ready"]) == ("spare", True)
    asking = "import sys; from shoal.client import Client; url, token = sys.argv[1:];"
    asking += "print(*(each.shape for each in Client(url, token=token).infer('line', {'input': [[0.5]]}).values()))"
    assert cluster.head.run(sys.executable, "-c", asking, url[1], cluster.token) == "(1, 1)\n"
