"""A replica that is two workers, for real: its answers, a worker that is killed, a new version, its end."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save

from shoal.client import Client
from shoal.cluster.embedded_cluster import EmbeddedCluster
from shoal.models.decoder import Decoder
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_source import model_from_ref
from shoal.weights import WeightSnapshot
from waiting import wait_for

SIZES = {"num_tokens": 11, "context": 4, "width": 16, "heads": 2, "depth": 2}
TOKENS = np.arange(8, dtype=np.int64).reshape(2, 4)
pytestmark = pytest.mark.timeout(1500)


def register(seed: int) -> np.ndarray:
    """The next version of `chat`, and its answer."""
    torch.manual_seed(seed)
    model = Decoder(**SIZES).eval()
    signature = Signature(
        inputs=[TensorSignature(name="tokens", datatype="INT64", shape=[-1, 4])],
        outputs=[TensorSignature(name="logits", datatype="FP32", shape=[-1, 4, 11])],
    )
    snapshot = WeightSnapshot.from_payload(1, save({name: each.clone() for name, each in model.state_dict().items()}))
    factory = ModelFactory(factory="shoal.models.decoder:Decoder", kwargs=SIZES)
    Registry().register("chat", snapshot, model=factory, signature=signature)
    with torch.inference_mode():
        answer: np.ndarray = model(torch.from_numpy(TOKENS)).numpy()
    return answer


def list_workers(cluster: EmbeddedCluster) -> list[int]:
    """The processes of the replica's workers."""
    names = {pid: psutil.Process(pid).name() for pid in cluster.pids() if psutil.pid_exists(pid)}
    return sorted(pid for pid, name in names.items() if "GangWorker" in name)


@pytest.fixture(scope="module")
def expected(cluster: EmbeddedCluster, shared_home: object) -> Iterator[tuple[Client, np.ndarray]]:
    from shoal.serve.on_ray.deployment import deploy

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_HOME", str(shared_home))
        answer = register(1)
        spec = EndpointSpec(name="gang", num_workers=2, num_cpus=0.5)
        with closing(deploy(spec, [model_from_ref("chat@champion")])) as endpoint, Client(endpoint.url) as client:
            yield client, answer
    wait_for(lambda: not list_workers(cluster))


def test_its_answers_are_those_of_one_process(expected: tuple[Client, np.ndarray]) -> None:
    client, answer = expected
    np.testing.assert_allclose(client.infer("chat", {"tokens": TOKENS})["logits"], answer, rtol=1e-4, atol=1e-5)


def test_a_new_version_is_taken_by_all_workers(expected: tuple[Client, np.ndarray]) -> None:
    """As the alias moves to it, and back."""
    client, answer = expected

    def has(logits: np.ndarray) -> bool:
        return np.allclose(client.infer("chat", {"tokens": TOKENS})["logits"], logits, rtol=1e-4, atol=1e-5)

    other = register(2)
    wait_for(lambda: has(other), what="the second version")
    Registry().rollback("chat")
    wait_for(lambda: has(answer), what="the first version")


def test_a_killed_worker_breaks_no_connection_and_is_replaced(
    cluster: EmbeddedCluster, expected: tuple[Client, np.ndarray]
) -> None:
    client, answer = expected
    before = list_workers(cluster)
    assert len(before) == 2
    replica = client.status().replicas[0].pid
    with closing(http.client.HTTPConnection(urlsplit(client.url).netloc)) as connection:
        assert ask(connection) == 200
        os.kill(before[1], signal.SIGKILL)
        seen = wait_for(lambda: (statuses := [ask(connection)])[0] != 200 and statuses, what="a request that fails")
        assert seen == [503]
        wait_for(lambda: ask(connection) == 200, what="other workers")
    np.testing.assert_allclose(client.infer("chat", {"tokens": TOKENS})["logits"], answer, rtol=1e-4, atol=1e-5)
    assert client.status().replicas[0].pid == replica
    assert not {*before} & {*wait_for(lambda: len(now := list_workers(cluster)) == 2 and now)}


def ask(connection: http.client.HTTPConnection) -> int:
    """The status of a request over a connection that stays. Fails where it is cut."""
    tensor = {"name": "tokens", "shape": [2, 4], "datatype": "INT64", "data": TOKENS.ravel().tolist()}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v2/models/chat/infer", json.dumps({"inputs": [tensor]}), headers)
    response = connection.getresponse()
    assert response.read()
    assert response.status == 200 or response.headers["Retry-After"] == "1"
    return response.status
