"""How replicas call each other: what goes along, what comes back, and connections that stay, close or are refused."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from serving.asgi import Client, client
from serving.fake_host import FakeHost, FakeModel, tensors
from shoal.batching.batcher import Prediction
from shoal.errors import ConnectionLost, InferenceError, RequestLost
from shoal.open_inference.messages import TensorMetadata
from shoal.serve.http.codec import HttpCodec
from shoal.serve.http.response import build_error_response
from shoal.serve.http.routes import RouteAction, match_route
from shoal.serve.messages.infer_call import InferCall
from shoal.serve.messages.inference import size_bytes
from shoal.serve.protocol import pipeline
from shoal.serve.protocol.pipeline import LARGE_BYTES, LARGE_ELEMENTS
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


# -- tensors that take long to read or to write: the client of a small request is answered meanwhile

COUNT = LARGE_BYTES  # elements of four bytes, or of one in JSON with its comma
MANY = np.ones((1, LARGE_ELEMENTS + 1), np.float32)
SMALL = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}


def host() -> FakeHost:
    def one(_: Any) -> dict[str, np.ndarray]:
        return {"y": np.ones((1, 1), np.float32)}

    wide, narrow = tensors(y=[-1, -1]), tensors(x=[-1, 3])
    return FakeHost(
        FakeModel("m", narrow),
        FakeModel("numbers", tensors(x=[-1, -1]), wide, one),
        FakeModel("texts", tensors(x=("BYTES", [-1, -1])), wide, one),
        FakeModel("many", narrow, wide, lambda _: {"y": MANY}),
    )


def gated(monkeypatch: pytest.MonkeyPatch, kind: type, work: str, is_large: Callable[..., bool]) -> threading.Event:
    """Let what is large wait until the event is set."""
    gate, original = threading.Event(), getattr(kind, work)

    def waits(codec: Any, *arguments: Any) -> Any:
        assert not is_large(*arguments) or gate.wait(30), "nobody else was answered meanwhile"
        return original(codec, *arguments)

    monkeypatch.setattr(kind, work, waits)
    return gate


def answers(large: Awaitable[Any], small: Awaitable[Any], gate: threading.Event) -> tuple[Any, Any]:
    async def both() -> tuple[Any, Any]:
        waiting = asyncio.ensure_future(large)
        await asyncio.sleep(0)  # until it waits
        try:
            answer = await small
        finally:
            gate.set()
        return await waiting, answer

    return asyncio.run(both())


def body_of(model: str) -> tuple[bytes, dict[str, str]]:
    tensor = {"name": "x", "shape": [1, COUNT]}
    if model == "numbers":
        text = json.dumps({"inputs": [{**tensor, "datatype": "FP32", "data": [1] * COUNT}]})
        return text.encode(), {}
    tensor |= {"datatype": "BYTES", "parameters": {"binary_data_size": 4 * COUNT}}
    head = json.dumps({"inputs": [tensor]}).encode()
    return head + bytes(4 * COUNT), {"inference-header-content-length": str(len(head))}


@pytest.mark.parametrize("model", ["numbers", "texts"])
def test_others_are_answered_while_a_large_body_is_read(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    gate = gated(monkeypatch, HttpCodec, "decode", lambda body, length: len(body) > LARGE_BYTES)
    app, (body, headers) = client(host()).app, body_of(model)
    many, few = answers(
        Client(app).call("POST", f"/v2/models/{model}/infer", [body], headers),
        Client(app).call("POST", "/v2/models/m/infer", [json.dumps(SMALL).encode()]),
        gate,
    )
    assert (many.status, few.status) == (200, 200)
    assert many.body["outputs"][0]["data"] == [1.0]


def test_others_are_answered_while_a_large_answer_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gated(monkeypatch, HttpCodec, "encode", lambda call, arrays, version: "y" in arrays)
    app, body = client(host()).app, json.dumps(SMALL).encode()
    many, few = answers(
        Client(app).call("POST", "/v2/models/many/infer", [body]),
        Client(app).call("POST", "/v2/models/m/infer", [body]),
        gate,
    )
    assert few.status == 200
    assert many.body["outputs"][0]["data"] == MANY.ravel().tolist()


def test_numbers_that_go_as_bytes_wait_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = threading.current_thread()
    gated(monkeypatch, HttpCodec, "encode", lambda *_: threading.current_thread() is not loops)
    reply = client(host()).infer({**SMALL, "parameters": {"binary_data_output": True}}, "/v2/models/many/infer")
    assert reply.tensors[1] == MANY.tobytes()


def test_no_more_large_bodies_wait_than_memory_is_meant_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gated(monkeypatch, HttpCodec, "decode", lambda body, length: len(body) > LARGE_BYTES)
    app, (body, _) = client(host()).app, body_of("numbers")
    monkeypatch.setattr(pipeline, "MAX_WAITING_BYTES", 2 * len(body))

    async def ask() -> list[int]:
        asked = [asyncio.create_task(Client(app).call("POST", "/v2/models/numbers/infer", [body])) for _ in range(4)]
        answered, _ = await asyncio.wait(asked[2:])
        gate.set()
        assert all(int(each.result().headers["retry-after"]) >= 1 for each in answered)
        return [(await each).status for each in asked]

    assert asyncio.run(ask()) == [200, 200, 429, 429]
    gate.set()
    assert client(host()).post("/v2/models/numbers/infer", body).status == 200


def test_the_size_of_inputs_is_what_they_keep_in_memory() -> None:
    assert size_bytes({"x": np.zeros((2, 3), np.float32), "y": np.zeros((2, 0), np.int64)}) == 24
    assert size_bytes({"x": np.frombuffer(bytes(100), np.uint8)[:10]}) == 10
    words = np.array([[b"a" * 1000], [b""]], object)
    assert 1000 <= size_bytes({"words": words}) - size_bytes({"words": np.array([[b""], [b""]], object)}) < 1100
