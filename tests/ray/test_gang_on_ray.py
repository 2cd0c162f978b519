"""Replicas that are two workers each, for real: answers, new versions, fewer replicas, and what is killed or hangs."""

import http.client
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
import torch
from ray.util import placement_group_table
from safetensors.torch import save

from hosts.scale_replicas import scale
from leftovers import pids_of
from registered import tensors
from shoal.client import Client
from shoal.cluster.embedded_cluster import EmbeddedCluster
from shoal.errors import InferenceError
from shoal.models.decoder import Decoder
from shoal.plugins.library import collect_extensions
from shoal.registry import ModelFactory, Registry, Signature
from shoal.serve.spec.endpoint import PREDICTORS, EndpointSpec
from shoal.serve.spec.model_source import model_from_ref
from shoal.weights import WeightSnapshot
from waiting import wait_for

SIZES = {"num_tokens": 11, "context": 4, "width": 16, "heads": 2, "depth": 2}
TOKENS = np.arange(8, dtype=np.int64).reshape(2, 4)
HANG_S = 4.0
NUM_CLIENTS = 3
REQUEST_TIMEOUT_S = 100.0  # more than any part of the endpoint waits
pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.soak,  # hosts/test_hosts.py has one that answers, loses a host, and is whole again
    pytest.mark.skipif("pipeline" not in collect_extensions(PREDICTORS), reason="no library shares models"),
]


def register(seed: int) -> np.ndarray:
    """The next version of `chat`, and its answer."""
    torch.manual_seed(seed)
    model = Decoder(**SIZES).eval()
    signature = Signature(
        inputs=tensors(tokens=("INT64", [-1, 4])),
        outputs=tensors(logits=[-1, 4, 11]),
    )
    snapshot = WeightSnapshot.from_payload(1, save({name: each.clone() for name, each in model.state_dict().items()}))
    factory = ModelFactory(factory="shoal.models.decoder:Decoder", kwargs=SIZES)
    Registry().register("chat", snapshot, model=factory, signature=signature)
    with torch.inference_mode():
        answer: np.ndarray = model(torch.from_numpy(TOKENS)).numpy()
    return answer


def list_workers(cluster: EmbeddedCluster) -> list[int]:
    """The processes of the replicas' workers, which are connected with each other; spare ones are not."""
    ends: dict[int, set[tuple[Any, Any]]] = {}
    for pid in sorted(pids_of(cluster, "GangWorker")):
        with suppress(psutil.Error):  # it has just ended
            ends[pid] = {(each.laddr, each.raddr) for each in psutil.Process(pid).net_connections() if each.raddr}
    return [
        pid for pid, own in ends.items()
        if any((there, here) in other for here, there in own for one, other in ends.items() if one != pid)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def expected(cluster: EmbeddedCluster, shared_home: object) -> Iterator[tuple[Client, np.ndarray]]:
    from shoal.serve.on_ray.deployment import deploy

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_HOME", str(shared_home))
        answer = register(1)
        spec = EndpointSpec(name="gang", num_workers=2, num_cpus=0.5, hang_s=HANG_S)
        with closing(deploy(spec, [model_from_ref("chat@champion")])) as endpoint, Client(endpoint.url) as client:
            yield client, answer
    wait_for(lambda: not pids_of(cluster, "GangWorker"))


def ask(connection: http.client.HTTPConnection, answer: np.ndarray | None = None) -> int:
    """The status of a request over a connection that stays. Fails where it is cut, and for another answer."""
    tensor = {"name": "tokens", "shape": [2, 4], "datatype": "INT64", "data": TOKENS.ravel().tolist()}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v2/models/chat/infer", json.dumps({"inputs": [tensor]}), headers)
    response = connection.getresponse()
    body = json.loads(response.read())
    assert response.status != 503 or response.headers["Retry-After"] == "1"
    if response.status == 200 and answer is not None:
        np.testing.assert_allclose(body["outputs"][0]["data"], answer.ravel(), rtol=1e-4, atol=1e-5)
    return response.status


@contextmanager
def load(url: str, answer: np.ndarray) -> Iterator[Counter[int]]:
    """Clients that ask one request after the other while the block runs; the statuses of all, at its end."""
    statuses, stop = Counter[int](), threading.Event()

    def run() -> Counter[int]:
        found = Counter[int]()
        with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=REQUEST_TIMEOUT_S)) as connection:
            while not stop.is_set():
                found[ask(connection, answer)] += 1
        return found

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients: list[Future[Counter[int]]] = [pool.submit(run) for _ in range(NUM_CLIENTS)]
        try:
            yield statuses
        finally:
            stop.set()
    for client in clients:
        statuses.update(client.result())


def list_ready(client: Client) -> set[int]:
    """The processes of the replicas that answer."""
    try:
        return {each.pid for each in client.status().replicas if each.ready}
    except InferenceError:  # of an endpoint whose controller is away
        return set()


def count_reservations() -> int:
    """How many groups of workers have their place."""
    return sum(each["state"] == "CREATED" for each in placement_group_table().values())


def scale_to_two(client: Client) -> set[int]:
    """The processes of both replicas."""
    scale("gang", 2)
    return wait_for(lambda: len(ready := list_ready(client)) == 2 and ready, what="two replicas")


def test_a_gang_that_is_not_wanted_answers_what_it_has_and_leaves_nothing(
    cluster: EmbeddedCluster, expected: tuple[Client, np.ndarray]
) -> None:
    """While it replaces its workers."""
    client, answer = expected
    replicas, workers = scale_to_two(client), {*list_workers(cluster)}
    with load(client.url, answer) as statuses:
        for pid in workers:  # both gangs', whichever is removed
            with suppress(ProcessLookupError):  # it has ended with the other one
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: {*list_workers(cluster)} - workers, what="the start of others")
        scale("gang", 1)
        wait_for(lambda: list_ready(client) < replicas, what="one replica")
        wait_for(lambda: len(pids_of(cluster, "GangWorker")) == 4, what="the end of its workers")
        wait_for(lambda: count_reservations() == 1, what="the end of its reservation")
        with closing(http.client.HTTPConnection(urlsplit(client.url).netloc)) as connection:
            wait_for(lambda: ask(connection, answer) == 200, what="an answer")
    assert {200} <= {*statuses} <= {200, 503}
