"""A cluster of two hosts by the commands of cluster.yaml, and a client's: an endpoint with an ingress on both, and
a gang that has a worker on each. The hosts lose each other."""
# Some endpoints here have a port for gRPC, which shoal.libs.grpc answers.

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from network import Host, Network, network, start_ray, why_none
from safetensors.torch import save

from certificates import Authority
from shoal.cluster.ingress.front import CertificateFiles
from shoal.models.perceptron import Perceptron
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.weights import WeightSnapshot
from shoal_program import ROOT, STATE_S, Program
from waiting import wait_for

pytestmark = [pytest.mark.skipif(bool(why_none()), reason=why_none()), pytest.mark.timeout(3600)]
DASHBOARD = "http://127.0.0.1:8265"
CLUSTER = "--address", DASHBOARD, "--timeout-s", f"{STATE_S:g}"
HANG_S = 12.0  # and so long an answer may take: nothing on the network says that a host is gone
REQUEST_S = 3.0  # stands for one of 50 s: twice as long is well below HANG_S
ASKING_S = 16
ASKER, HOLDER, SCALER, QUEUER = (
    ROOT / f"tests/hosts/{name}.py" for name in ("ask_steadily", "hold_requests", "scale_replicas", "wait_in_queue")
)


@dataclass
class Cluster:
    network: Network
    shared: Path
    head: Host
    worker: Host
    client: Host
    authority: Authority

    def shoal(self, *words: str) -> str:
        """What a user types on the head, who has the project's jobs in the current folder."""
        return self.head.run("env", f"SHOAL_CA={self.authority.ca}", "shoal", *words)

    @property
    def token(self) -> str:
        return (self.shared / "token").read_text().strip()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("hosts")
    with network(folder) as made:
        head, worker, client = map(made.add, ("head", "worker", "client"))
        there = Cluster(made, folder / "shared", head, worker, client, Authority(folder / "shared"))
        shutil.copytree(ROOT / "jobs", there.head.project / "jobs")
        for host in (there.head, there.worker):
            start_ray(host, there.head)
        yield there


def _register(cluster: Cluster, name: str = "linear") -> int:
    """Returns the bytes of its payload."""
    x, y = ([TensorSignature(name=name, datatype="FP32", shape=[-1, size])] for name, size in (("x", 4), ("y", 2)))
    linear = ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": 4, "out_features": 2})
    tensors = {"weight": np.zeros((2, 4), np.float32), "bias": np.zeros(2, np.float32)}
    made = Registry(cluster.shared / "registry").register(
        name, WeightSnapshot.of(1, tensors), model=linear, signature=Signature(inputs=x, outputs=y)
    )
    return made.manifest.size_bytes


@dataclass
class Endpoint:
    """With a replica on each of two hosts, and an ingress on both. `ca`: for its clients' environment."""

    name: str
    port: str
    grpc_port: str
    ca: dict[str, str]


HOOKS = """\
import socket
import time

def wait_as_told(arrays):
    time.sleep(float(arrays["x"].max()))
    return arrays

def say_where(arrays):
    return {"y": arrays["output"] * 0 + ["head", "worker"].index(socket.gethostname())}
"""


@pytest.fixture(scope="module")
def endpoint(cluster: Cluster) -> Endpoint:
    _register(cluster, name := "linear")
    (cluster.head.project / "waiting_hooks.py").write_text(HOOKS)
    files = _sign(cluster)
    words = ["--replicas", "2", "endpoint.num_cpus=1.5", "endpoint.grpc_port=0", "endpoint.model.max_batch_size=1"]
    words += ["endpoint.show_errors=true", f"endpoint.hang_s={HANG_S:g}", "endpoint.ingress=every_node"]
    words += ["endpoint.host=0.0.0.0", f"endpoint.tls.certificate={files.certificate}"]
    words += [f"endpoint.tls.key={files.key}", "endpoint.model.preprocess=waiting_hooks:wait_as_told"]
    words += ["endpoint.model.postprocess=waiting_hooks:say_where", "endpoint.lifetime=detached", *CLUSTER]
    said = cluster.shoal("serve", "deploy", name, *words)
    address = re.escape(cluster.head.address)
    found = re.search(rf"endpoint {name} is ready at https://{address}:(\d+), .* of each node with a replica", said)
    assert found, said
    status = json.loads(cluster.shoal("serve", "status", "--json"))
    assert {each["host"] for each in status["replicas"] if each["ready"]} == {"head", "worker"}
    return Endpoint(name, found[1], status["grpc"].rpartition(":")[2], {"SHOAL_CA": str(cluster.authority.ca)})


def _sign(cluster: Cluster) -> CertificateFiles:
    """A new certificate, for both ingresses. Its files are on all hosts, which share the file system."""
    return cluster.authority.sign(names=(cluster.head.address, cluster.worker.address))


@pytest.mark.soak
@pytest.mark.parametrize("num_messages", [4, 80])
def test_a_replica_of_another_host_is_removed_and_cuts_nothing(
    cluster: Cluster, endpoint: Endpoint, num_messages: int
) -> None:
    """Each ingress has a stream, and requests at both replicas: none is cut, and a balancer hears that one is to go.

    A replica computes its two requests one after the other, and a quarter of a second for each message.
    """
    addresses = [cluster.head.address, cluster.worker.address]
    numbers = [str(REQUEST_S), str(num_messages), endpoint.port, endpoint.grpc_port]
    words = [cluster.token, endpoint.name, *numbers, *addresses]
    attach = ["bash", "-c", f"cd; . ~/shoal-host.env; python {SCALER} {endpoint.name}"]
    with ExitStack() as stack:
        scaling = stack.enter_context(cluster.head.start(attach, stdin=subprocess.PIPE))
        scaling.wait_for_line("^attached$")
        holding = stack.enter_context(cluster.client.start([sys.executable, str(HOLDER), *words], endpoint.ca))
        holding.wait_for_line("^asking$")
        _scale(scaling, 1)
        assert holding.wait() == 0
        became = json.loads(holding.said.splitlines()[-1])
        assert [sorted(became["answers"][each : each + 2]) for each in (0, 2)] == [["0.0", "1.0"]] * 2
        assert became["streams"] == [f"{num_messages} answers"] * 2
        assert became["left"] == "503"
        wait_for(lambda: _hosts(cluster) == {"head"}, STATE_S, "one replica")
        _scale(scaling, 2)
        wait_for(lambda: _hosts(cluster) == {"head", "worker"}, STATE_S, "two replicas")


def _scale(scaling: Program, number: int) -> None:
    scaling.process.stdin.write(f"{number}\n")
    scaling.process.stdin.flush()


@pytest.mark.soak
def test_each_host_renews_its_certificate(cluster: Cluster, endpoint: Endpoint) -> None:
    new = Path(_sign(cluster).certificate).read_text().strip()
    show = "import ssl, sys; print(ssl.get_server_certificate((sys.argv[1], int(sys.argv[2]))))"

    def is_new(host: Host) -> bool:
        return cluster.client.run(sys.executable, "-c", show, host.address, endpoint.port).strip() == new

    for host in (cluster.head, cluster.worker):
        wait_for(partial(is_new, host), STATE_S, f"the new certificate of {host.name}")


def test_a_head_that_was_killed_comes_back_with_its_endpoint_and_its_queue(
    cluster: Cluster, endpoint: Endpoint
) -> None:
    """Meanwhile the ingress of the other host answers every request."""
    attach = ["bash", "-c", f"cd; . ~/shoal-host.env; RAY_ADDRESS={cluster.head.address}:6379 python {QUEUER}"]
    url = f"https://{cluster.worker.address}:{endpoint.port}"
    asks = [sys.executable, str(ASKER), url, cluster.token, endpoint.name, "20", f"{ASKING_S:g}"]
    with ExitStack() as stack:
        queue = stack.enter_context(cluster.worker.start(attach, stdin=subprocess.PIPE))
        queue.wait_for_line("^waiting$")
        asking = stack.enter_context(cluster.client.start(asks, endpoint.ca))
        asking.wait_for_line("^asking$")
        cluster.head.kill()
        cluster.head.run("bash", "-c", "rm -r /tmp/ray/*")  # as a boot does
        start_ray(cluster.head, cluster.head)
        assert asking.wait() == 0
        assert json.loads(asking.said.splitlines()[-1]) == {"200": 20 * ASKING_S}
        wait_for(lambda: _has_come_back(cluster), STATE_S, "the head's ingress and its replica")
        queue.process.stdin.write("\n")
        queue.process.stdin.flush()
        assert queue.wait_for_line("^queue: (.*)$")[1] == "run-that-waits"


def _has_come_back(cluster: Cluster) -> bool:
    try:
        return _hosts(cluster) == {"head", "worker"}
    except AssertionError:  # it listens for nobody yet
        return False


@dataclass
class Gang:
    """One replica of two workers, for which no host has room: each has one. Its ingress is the other endpoint's."""

    url: str
    expected: list[list[float]]

    def ask(self, cluster: Cluster) -> list[list[float]]:
        """The answer to a client, through the head."""
        asking = "import json, sys; from shoal.client import Client; url, token, x = sys.argv[1:];"
        asking += "print(Client(url, token=token, num_retries=100).infer('layers', {'x': json.loads(x)})['y'].tolist())"
        words = ["env", f"SHOAL_CA={cluster.authority.ca}", sys.executable, "-c", asking]
        found: list[list[float]] = json.loads(cluster.client.run(*words, self.url, cluster.token, json.dumps(ROWS)))
        return found


ROWS = np.arange(8.0).reshape(2, 4).tolist()


@pytest.fixture(scope="module")
def gang(cluster: Cluster, endpoint: Endpoint) -> Gang:
    torch.manual_seed(0)
    sizes = {"num_features": 4, "num_outputs": 2}
    model = Perceptron(**sizes)
    x, y = ([TensorSignature(name=name, datatype="FP32", shape=[-1, size])] for name, size in (("x", 4), ("y", 2)))
    Registry(cluster.shared / "registry").register(
        "layers",
        WeightSnapshot.from_payload(1, save(model.state_dict())),
        model=ModelFactory(factory="shoal.models.perceptron:Perceptron", kwargs=sizes),
        signature=Signature(inputs=x, outputs=y),
    )
    words = ["endpoint.num_workers=2", "endpoint.num_cpus=0.4", f"endpoint.hang_s={HANG_S:g}", *CLUSTER]
    said = cluster.shoal("serve", "deploy", "layers", *words)
    with torch.inference_mode():
        expected = model(torch.tensor(ROWS)).tolist()
    found = re.search(r"endpoint layers is ready at ([^\s,]+)", said)
    assert found, said
    return Gang(found[1], expected)


def test_a_network_that_ends_keeps_the_mounts_of_another(tmp_path: Path) -> None:
    with network(tmp_path, has_disks=True) as first:
        host = first.add("head")
        host.run("touch", "/tmp/ray/mine")
        with network(tmp_path, has_disks=True) as second:
            second.add("head")
        host.run("test", "-e", "/tmp/ray/mine")


def _count_workers(host: Host) -> int:
    """The workers of a gang, and its spare ones."""
    return host.run("ps", "-eo", "args").count("ray::GangWorker")


def test_a_gang_of_two_hosts_answers_as_one_process(cluster: Cluster, gang: Gang) -> None:
    hosts = cluster.head, cluster.worker
    wait_for(
        lambda: [_count_workers(host) for host in hosts] == [2, 2], STATE_S, "a worker and a spare one on each host"
    )
    np.testing.assert_allclose(gang.ask(cluster), gang.expected, rtol=1e-4, atol=1e-5)


def test_each_of_two_hosts_that_lose_each_other_answers_on(cluster: Cluster, endpoint: Endpoint, gang: Gang) -> None:
    """A balancer reaches both ingresses; then the link is cut, and each has the replicas of its own host alone."""
    urls = [f"https://{host.address}:{endpoint.port}" for host in (cluster.head, cluster.worker)]
    asked = [(cluster.client, urls[0], endpoint.name, 20), (cluster.worker, urls[1], endpoint.name, 20)]
    asked.append((cluster.client, gang.url, "layers", 10))
    with ExitStack() as stack:
        askers = []
        for host, url, model, rate in asked:
            asks = [sys.executable, str(ASKER), url, cluster.token, model, str(rate), f"{ASKING_S:g}"]
            askers.append(stack.enter_context(host.start(asks, endpoint.ca)))
        for asking in askers:
            asking.wait_for_line("^asking$")  # of both replicas by now
        cluster.network.cut(cluster.worker)
        assert [asking.wait() for asking in askers] == [0, 0, 0]
        outcomes = [json.loads(asking.said.splitlines()[-1]) for asking in askers]
    of_gang = outcomes.pop()
    assert sum(of_gang.values()) == 10 * ASKING_S
    assert {"200", "503"} <= set(of_gang) <= {"200", "503", "504"}, of_gang
    for answered in outcomes:
        assert sum(answered.values()) == 20 * ASKING_S
        # What the other's replica had in hand is told after HANG_S.
        assert set(answered) <= {"200", "503", "504"}, outcomes
        assert answered["200"] >= 0.95 * 20 * ASKING_S, outcomes
    cluster.network.power_off(cluster.worker)
    wait_for(lambda: _hosts(cluster, endpoint.name) == {"head"}, STATE_S, "word that the other host is gone")
    assert "gone" in cluster.shoal("serve", "delete", endpoint.name, "--address", DASHBOARD)


def test_a_gang_that_has_lost_a_host_is_whole_again_once_another_has_room(cluster: Cluster, gang: Gang) -> None:
    """Here, once the other endpoint is gone."""
    wait_for(lambda: _count_workers(cluster.head) == 4, STATE_S, "both workers on the host that is left")
    wait_for(lambda: _hosts(cluster) == {"head"}, STATE_S, "its replica")
    np.testing.assert_allclose(gang.ask(cluster), gang.expected, rtol=1e-4, atol=1e-5)


def _hosts(cluster: Cluster, name: str = "") -> set[str]:
    status = json.loads(cluster.shoal("serve", "status", *filter(None, [name]), "--json"))
    return {replica["host"] for replica in status["replicas"] if replica["ready"]}
