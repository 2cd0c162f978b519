"""Tensors that take long to read or to write: the client of a small request is answered meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from serving.asgi import Client, client
from serving.fake_host import FakeHost, FakeModel, tensors
from shoal.serve.http.codec import HttpCodec
from shoal.serve.messages.inference import size_bytes
from shoal.serve.protocol import pipeline
from shoal.serve.protocol.pipeline import LARGE_BYTES, LARGE_ELEMENTS

COUNT = LARGE_BYTES  # elements of four bytes, or of one in JSON with its comma
MANY = np.ones((1, LARGE_ELEMENTS + 1), np.float32)
SMALL = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}


def host() -> FakeHost:
    def one(_: Any) -> dict[str, np.ndarray]:
        return {"y": np.ones((1, 1), np.float32)}

    wide, narrow = tensors(y=("FP32", [-1, -1])), tensors(x=("FP32", [-1, 3]))
    return FakeHost(
        FakeModel("m", narrow),
        FakeModel("numbers", tensors(x=("FP32", [-1, -1])), wide, one),
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
