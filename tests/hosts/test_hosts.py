"""A cluster of two hosts by the commands of cluster.yaml, and a client's: training, the loop, and an endpoint whose
second host loses power."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from network import ROOT, Host, Network, network, start_ray, why_none

from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.weights import WeightSnapshot
from waiting import wait_for

pytestmark = [pytest.mark.skipif(bool(why_none()), reason=why_none()), pytest.mark.timeout(2400)]
DASHBOARD = "http://127.0.0.1:8265"
ASKER = ROOT / "tests/hosts/ask_steadily.py"


@dataclass
class Cluster:
    network: Network
    shared: Path
    head: Host
    worker: Host
    client: Host

    def shoal(self, *words: str, timeout_s: float = 280.0) -> str:
        """What a user types on the head, who has the project's jobs in the current folder."""
        return self.head.run("shoal", *words, timeout_s=timeout_s)

    @property
    def token(self) -> str:
        return (self.shared / "token").read_text().strip()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("hosts")
    with network(folder) as made:
        there = Cluster(made, folder / "shared", *map(made.add, ("head", "worker", "client")))
        shutil.copytree(ROOT / "jobs", there.head.project / "jobs")
        for host in (there.head, there.worker):
            start_ray(host, there.head)
        yield there


def test_ranks_of_two_hosts_train_as_one_process(cluster: Cluster) -> None:
    said = cluster.shoal("run", "tabular", "parallel=ddp", "workers=4", "stop.steps=40", "--address", DASHBOARD)
    rays_own = ("dashboard_sdk.py", "packaging.py", "working_dir.py", "job_manager.py")
    assert not [line for line in said.splitlines() if any(name in line for name in rays_own)], said
    alone = cluster.head.run(sys.executable, "-m", "shoal.train", "task=jobs/tabular.py", "stop.steps=40")
    assert _loss(said) == pytest.approx(_loss(alone), rel=0.02), said + alone


def _loss(said: str) -> float:
    """Of the last line that tells one, in three or four digits."""
    found = re.findall(r"\bloss ([\d.]+)", said)
    assert found, said
    return float(found[-1].rstrip("."))


def test_an_actor_elsewhere_teaches_a_policy_that_both_hosts_serve(cluster: Cluster) -> None:
    words = ["target_return=40", "gateway.host=0.0.0.0", "gateway.curve=true", "endpoint.num_replicas=4"]
    learning = cluster.head.start(
        ["shoal", "run", "actor_learner", *words, "endpoint.num_cpus=0.3", "--address", DASHBOARD]
    )
    try:
        assert learning.stdout is not None
        before = []
        for line in learning.stdout:
            before.append(line)
            if "--connect" in line:
                break
        else:
            pytest.fail("".join(before))
        assert f"tcp://{cluster.head.address}:" in before[-1], "the address is one that others reach"
        command = [sys.executable, *shlex.split(before[-1])[1:]]
        nobodys = {"SHOAL_HOME": str(cluster.client.home), "SHOAL_TOKEN": cluster.token}
        actors = [cluster.client.start(command, nobodys) for _ in range(2)]
        said, _ = learning.communicate(timeout=900)
        assert learning.returncode == 0, "".join(before) + said
        assert re.search(r"cartpole@1 \(champion\): mean return", said), said
        for actor in actors:
            told, _ = actor.communicate(timeout=300)
            assert actor.returncode == 0, told
    finally:
        learning.kill()


def _registered(cluster: Cluster) -> str:
    x, y = ([TensorSignature(name=name, datatype="FP32", shape=[-1, size])] for name, size in (("x", 4), ("y", 2)))
    linear = ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": 4, "out_features": 2})
    tensors = {"weight": np.zeros((2, 4), np.float32), "bias": np.zeros(2, np.float32)}
    Registry(cluster.shared / "registry").register(
        "linear", WeightSnapshot.of(1, tensors), model=linear, signature=Signature(inputs=x, outputs=y)
    )
    return "linear"


def test_an_endpoint_whose_second_host_loses_power_answers_on(cluster: Cluster) -> None:
    name = _registered(cluster)
    # Two fit on each host; more than the worker's own share of the load is lost in no other way.
    said = cluster.shoal("serve", "deploy", name, "--replicas", "4", "endpoint.num_cpus=0.9", "--address", DASHBOARD)
    found = re.search(rf"endpoint {name} is ready at (http://127.0.0.1:\d+), on the loopback of the head", said)
    assert found, said
    assert _hosts(cluster) == {"head", "worker"}
    assert "replicas 4 of 4 ready on 2 hosts" in cluster.shoal("serve", "status", "--once")
    asking = cluster.head.start([sys.executable, str(ASKER), found[1], cluster.token, name, "20", "30"])
    try:
        assert asking.stdout is not None
        assert asking.stdout.readline() == "asking\n"  # of both hosts by now
        cluster.network.power_off(cluster.worker)
        answered = _answered(asking)
    finally:
        asking.kill()
    assert "lost" not in answered
    assert sum(answered.values()) == 600
    # What its replicas had in hand is told after 60 s: nothing on the network says that they are gone.
    assert set(answered) <= {"200", "503", "504"}
    assert answered["200"] >= 580, answered
    wait_for(lambda: _hosts(cluster) == {"head"}, 120, "word that the other host is gone")
    assert "of 4 ready" in cluster.shoal("serve", "status", "--once"), "as many as there were are to be"
    assert "gone" in cluster.shoal("serve", "delete", name, "--address", DASHBOARD)


def _hosts(cluster: Cluster) -> set[str]:
    status = json.loads(cluster.shoal("serve", "status", "--json"))
    return {replica["host"] for replica in status["replicas"] if replica["ready"]}


def _answered(asking: subprocess.Popen[str]) -> dict[str, int]:
    said, _ = asking.communicate(timeout=400)
    counts: dict[str, int] = json.loads(said)
    return counts
