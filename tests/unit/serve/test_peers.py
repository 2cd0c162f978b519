"""How replicas call each other: what goes along, what comes back, and connections that stay, close or are refused."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import numpy as np
import pytest

from shoal.batching.batcher import Prediction
from shoal.errors import ConnectionLost, InferenceError, RequestLost
from shoal.open_inference.messages import TensorMetadata
from shoal.serve.http.codec import HttpCodec
from shoal.serve.http.response import build_error_response
from shoal.serve.http.routes import RouteAction, match_route
from shoal.serve.messages.infer_call import InferCall
from shoal.serve.replica.peers import PeerTransport, decode_answer, encode_call

INPUTS = [TensorMetadata("x", "FP32", [-1, 2]), TensorMetadata("b", "BF16", [-1]), TensorMetadata("t", "BYTES", [-1])]
DATATYPES = {each.name: each.datatype for each in INPUTS}


def call(**fields: Any) -> InferCall:
    arrays = {
        "x": np.arange(4, dtype=np.float32).reshape(2, 2),
        "b": np.array([1, 2], np.uint16),
        "t": np.array([b"a", b"\0\xff"], object),
    }
    return InferCall(arrays, 2, **fields)


def test_a_call_arrives_as_it_was() -> None:
    asked = call(outputs=frozenset({"x"}), id="7", tenant="bü", track="candidate", sticky="ä b")
    asked.version, asked.deadline_s = 3, time.monotonic() + 5.0
    path, headers, body = encode_call("m", asked, DATATYPES, "secret", 12)
    target = match_route(path)
    assert target is not None
    assert (target.action, target.model, target.version) == (RouteAction.PEER_INFER, "m", "3")
    assert (headers["shoal-peer"], headers["shoal-generation"], headers["shoal-track"]) == ("secret", "12", "candidate")
    assert (headers["shoal-tenant"], headers["shoal-sticky"]) == ("b%C3%BC", "%C3%A4%20b")
    assert 0.0 < float(headers["shoal-deadline-ms"]) <= 5000.0
    codec = HttpCodec("m", INPUTS, INPUTS, 4)
    arrived = codec.decode(body, int(headers["inference-header-content-length"]))
    assert (arrived.num_rows, arrived.id, arrived.outputs) == (2, "7", frozenset({"x"}))
    for name, array in asked.inputs.items():
        np.testing.assert_array_equal(arrived.inputs[name], array)


def test_an_answer_comes_back_as_it_was() -> None:
    asked = call(binary=True)
    answer = HttpCodec("m", INPUTS, INPUTS, 4).encode(asked, asked.inputs, 9)
    headers = {name.decode(): value.decode() for name, value in answer.headers} | {"shoal-batch": "0.25 0.5 8"}
    got = decode_answer(200, headers, b"".join((answer.body, *answer.parts)))
    assert got[1:] == Prediction({}, 9, 0.25, 0.5, 8)[1:]
    for name, array in asked.inputs.items():
        np.testing.assert_array_equal(got.outputs[name], array)
    with pytest.raises(ConnectionLost, match="not understood"):
        decode_answer(200, {}, b"hello")


def test_an_error_comes_back_as_it_is() -> None:
    answer = build_error_response(InferenceError(429, "full", retry_after_s=3.0))
    headers = {name.decode(): value.decode() for name, value in answer.headers}
    with pytest.raises(InferenceError, match="full") as caught:
        decode_answer(answer.status, headers, answer.body)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 3.0)


class Peer:
    """Answers each request with its number, and closes a connection after `most` requests, without a word."""

    def __init__(self, most: int) -> None:
        self.most, self.num_connections = most, 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        for number in range(self.most):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n%d" % number)
        writer.close()


async def test_connections_stay_open_and_a_closed_one_is_replaced() -> None:
    peer, transport = Peer(2), PeerTransport()
    async with await asyncio.start_server(peer.serve, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        answers = [await transport.post(address, "/", {"a": "b"}, b"body") for _ in range(5)]
        assert [body for _, _, body in answers] == [b"0", b"1", b"0", b"1", b"0"]
        assert peer.num_connections == 3
        transport.retain([address])
        assert len(transport._idle[address]) == 1
        transport.retain([])
        assert not transport._idle
    with pytest.raises(ConnectionLost, match="did not answer") as caught:
        await transport.post(address, "/", {}, b"")
    assert not isinstance(caught.value, RequestLost)  # it was not sent


async def test_an_answer_that_streams_is_sent_on_as_it_comes_and_its_end_is_told_from_a_loss() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nserver: x\r\nshoal-model-version: 3\r\n"
    chunks, answers = b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n", list[bytes]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"\r\nconnection: close\r\n" in await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0))
        writer.close()

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        answers += [head + chunks + b"1\r\nc\r\n0\r\n\r\n", head + b"content-length: 3\r\n\r\nabc"]
        for _ in range(2):
            sent.clear()
            await PeerTransport().relay(address, "/v1/messages", {}, b"", send)
            assert b"".join(each.get("body", b"") for each in sent) == b"abc"
            assert (b"shoal-model-version", b"3") in sent[0]["headers"]
            assert (b"server", b"x") not in sent[0]["headers"]
            assert not sent[-1].get("more_body")
        answers += [head + chunks, b"HTTP/1.1 503 no\r\ncontent-length: 0\r\n\r\n", b""]
        with pytest.raises(InferenceError, match="lost before the answer's end"):
            await PeerTransport().relay(address, "/", {}, b"", send)
        sent.clear()
        with pytest.raises(InferenceError, match="cannot answer now"):
            await PeerTransport().relay(address, "/", {}, b"", send)
        with pytest.raises(RequestLost):
            await PeerTransport().relay(address, "/", {}, b"", send)
        assert not sent


async def test_a_peer_that_dies_with_the_request_is_lost() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        with pytest.raises(RequestLost):
            await PeerTransport().post(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "/", {}, b"body")
