"""The protocol over real sockets: large bodies both ways, bodies that are refused, and connections that live on."""

import asyncio
import gzip
import json
import socket
from collections.abc import Iterator

import httpx2
import numpy as np
import pytest

from serving.fake_host import FakeHost, FakeModel, tensors
from serving.replica_server import served as replica
from serving.served_here import TOKEN, served
from shoal.cluster.ports import find_free_port

KEY = {"Authorization": f"Bearer {TOKEN}"}
INFER = "/v2/models/m/infer"
ROW = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1.5]}]}


@pytest.fixture(scope="module")
def caller() -> Iterator[httpx2.Client]:
    host = FakeHost(FakeModel("m", tensors(x=("FP32", [-1, -1]))))
    with served(host) as (address, _), httpx2.Client(base_url=address, headers=KEY, timeout=30.0) as client:
        yield client


def test_ten_megabytes_there_and_back(caller: httpx2.Client) -> None:
    array = np.random.default_rng(0).random((4, 625_000), dtype=np.float32)
    tensor = {"name": "x", "shape": [4, 625_000], "datatype": "FP32", "parameters": {"binary_data_size": array.nbytes}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    reply = caller.post(
        INFER, content=head + array.tobytes(), headers={"Inference-Header-Content-Length": str(len(head))}
    )
    length = int(reply.headers["inference-header-content-length"])
    assert reply.content[length:] == array.tobytes()
    assert caller.post(INFER, json=ROW).json()["outputs"][0]["data"] == [1.5]  # over the same connection


def test_a_body_of_unknown_length(caller: httpx2.Client) -> None:
    body = json.dumps(ROW).encode()
    assert caller.post(INFER, content=iter([body[:5], body[5:]])).status_code == 200


def test_a_body_over_the_limit_is_refused_and_the_connection_closed(caller: httpx2.Client) -> None:
    reply = caller.post(INFER, content=iter([b"x" * (1 << 20)] * 17))
    assert (reply.status_code, reply.headers["connection"]) == (413, "close")
    assert caller.post(INFER, json=ROW).status_code == 200


def test_a_false_length_is_refused_before_a_byte_of_the_body_is_sent(caller: httpx2.Client) -> None:
    with socket.create_connection((caller.base_url.host, caller.base_url.port or 0), timeout=10.0) as connection:
        head = [
            "POST /v2/models/m/infer HTTP/1.1",
            "host: x",
            f"authorization: Bearer {TOKEN}",
            f"content-length: {10**15}",
        ]
        connection.sendall("\r\n".join([*head, "", ""]).encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_compressed_body_that_would_burst_is_refused(caller: httpx2.Client) -> None:
    bomb = gzip.compress(b"[" + b"0," * (10 << 20) + b"0]")
    reply = caller.post(INFER, content=bomb, headers={"content-encoding": "gzip"})
    assert (reply.status_code, list(reply.json())) == (413, ["error"])


@pytest.mark.parametrize(("sent", "declared"), [(10, 100), (0, 100), (100_000, 200_000)])
def test_a_body_that_ends_early_is_answered_with_400(sent: int, declared: int) -> None:
    """HAProxy 2.8 takes such a client for one that has gone: it closes both connections and answers nothing."""

    async def body() -> None:
        port = find_free_port()
        async with replica(FakeHost(FakeModel("m")), port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                "\r\n".join(
                    [f"POST {INFER} HTTP/1.1", "host: x", f"content-length: {declared}", "", "x" * sent]
                ).encode()
            )
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 60.0)  # to the end: the server closes, too
            writer.close()
            assert answer.startswith(b"HTTP/1.1 400 "), answer[:200]
            assert f'{{"error":"the body ends after {sent} of {declared} bytes"}}'.encode() in answer

    asyncio.run(body())
