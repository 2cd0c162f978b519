"""A cluster of two hosts by the commands of cluster.yaml, and a client's: training, the loop, and an endpoint whose
second host loses power."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from network import Host, Network, network, start_ray, why_none

from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.weights import WeightSnapshot
from shoal_program import ROOT, STATE_S
from waiting import wait_for

pytestmark = [pytest.mark.skipif(bool(why_none()), reason=why_none()), pytest.mark.timeout(3600)]
DASHBOARD = "http://127.0.0.1:8265"
LEARNING_S = 1500.0
ASKER = ROOT / "tests/hosts/ask_steadily.py"


@dataclass
class Cluster:
    network: Network
    shared: Path
    head: Host
    worker: Host
    client: Host

    def shoal(self, *words: str) -> str:
        """What a user types on the head, who has the project's jobs in the current folder."""
        return self.head.run("shoal", *words)

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
    command = ["shoal", "run", "actor_learner", *words, "endpoint.num_cpus=0.3", "--address", DASHBOARD]
    with cluster.head.start(command, limit_s=LEARNING_S) as learning, ExitStack() as stack:
        told = learning.wait_for_line(".*--connect.*")[0]
        assert f"tcp://{cluster.head.address}:" in told, "the address is one that others reach"
        acting = [sys.executable, *shlex.split(told)[1:]]
        nobodys = {"SHOAL_HOME": str(cluster.client.home), "SHOAL_TOKEN": cluster.token}
        actors = [stack.enter_context(cluster.client.start(acting, nobodys, LEARNING_S)) for _ in range(2)]
        assert learning.wait(LEARNING_S) == 0
        assert re.search(r"cartpole@1 \(champion\): mean return", learning.said)
        assert [actor.wait() for actor in actors] == [0, 0]


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
    assert "replicas 4 of 4 ready on 2 hosts" in cluster.shoal("serve", "status")
    with cluster.head.start([sys.executable, str(ASKER), found[1], cluster.token, name, "20", "30"]) as asking:
        asking.wait_for_line("^asking$")  # of both hosts by now
        cluster.network.power_off(cluster.worker)
        assert asking.wait() == 0
        answered = json.loads(asking.said.splitlines()[-1])
    assert "lost" not in answered
    assert sum(answered.values()) == 600
    # What its replicas had in hand is told after 20 s: nothing on the network says that they are gone.
    assert set(answered) <= {"200", "503", "504"}
    assert answered["200"] >= 580, answered
    wait_for(lambda: _hosts(cluster) == {"head"}, STATE_S, "word that the other host is gone")
    assert "of 4 ready" in cluster.shoal("serve", "status"), "as many as there were are to be"
    assert "gone" in cluster.shoal("serve", "delete", name, "--address", DASHBOARD)


def _hosts(cluster: Cluster) -> set[str]:
    status = json.loads(cluster.shoal("serve", "status", "--json"))
    return {replica["host"] for replica in status["replicas"] if replica["ready"]}
