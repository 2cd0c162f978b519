"""A client that ends its side of the connection within a body gets an answer from a replica's server.

HAProxy 2.8 takes such a client for one that has gone: it closes both connections and answers nothing.
"""

from __future__ import annotations

import asyncio

import pytest

from serving.fake_host import FakeHost, FakeModel
from serving.grpc_replica import served
from shoal.cluster.ports import find_free_port

TIMEOUT_S = 60.0
INFER = "POST /v2/models/m/infer HTTP/1.1"


@pytest.mark.parametrize(("sent", "declared"), [(10, 100), (0, 100), (100_000, 200_000)])
def test_a_body_that_ends_early_is_answered_with_400(sent: int, declared: int) -> None:
    async def body() -> None:
        port = find_free_port()
        async with served(FakeHost(FakeModel("m")), port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write("\r\n".join([INFER, "host: x", f"content-length: {declared}", "", "x" * sent]).encode())
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), TIMEOUT_S)  # to the end: the server closes, too
            writer.close()
            assert answer.startswith(b"HTTP/1.1 400 "), answer[:200]
            assert f'{{"error":"the body ends after {sent} of {declared} bytes"}}'.encode() in answer

    asyncio.run(body())
