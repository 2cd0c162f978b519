"""The protocol over real sockets: large bodies both ways, bodies that are refused, and connections that live on."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import numpy as np
import pytest

from serving.fake_host import FakeHost, FakeModel, tensors
from serving.replica_server import LIMITS
from serving.replica_server import served as replica
from serving.served_here import TOKEN, served
from shoal.cluster.ports import find_free_port
from shoal.serve.protocol.request_limits import RequestLimits

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


def converse(limits: RequestLimits, test: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> bytes:
    """What a replica answers, to the end, on a connection on which `test` writes."""

    async def body() -> bytes:
        port = find_free_port()
        async with replica(FakeHost(FakeModel("m")), port, limits=limits):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await test(reader, writer)
            answer = await asyncio.wait_for(reader.read(), 60.0)
            writer.close()
            return answer

    return asyncio.run(body())


@pytest.mark.parametrize(("sent", "declared"), [(10, 100), (0, 100), (100_000, 200_000)])
def test_a_body_that_ends_early_is_answered_with_400(sent: int, declared: int) -> None:
    """HAProxy 2.8 takes such a client for one that has gone: it closes both connections and answers nothing."""

    async def end_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"POST {INFER} HTTP/1.1\r\nhost: x\r\ncontent-length: {declared}\r\n\r\n{'x' * sent}".encode())
        writer.write_eof()

    answer = converse(LIMITS, end_early)
    assert answer.startswith(b"HTTP/1.1 400 "), answer[:200]
    assert f'{{"error":"the body ends after {sent} of {declared} bytes"}}'.encode() in answer
