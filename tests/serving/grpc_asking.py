"""The gRPC service on a real port of this process, and a client that asks it as the test says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from serving.fake_host import FakeHost
from shoal.open_inference import inference_pb2 as pb
from shoal.serve.protocol.access import Access
from shoal.serve.protocol.grpc_server import METHODS, SERVICE, GrpcServer
from shoal.serve.protocol.grpc_service import InferenceServicer

TIMEOUT_S = 10.0
Ask = Callable[..., Any]


@asynccontextmanager
async def served(host: FakeHost, access: Access | None = None) -> AsyncIterator[Ask]:
    """`ask(method, request, metadata=..., timeout=...)` is a call of the service; those without streams are awaited.

    An asynchronous iterator of requests is sent as a stream, whatever the method takes.
    """
    server = GrpcServer(InferenceServicer(host, access or Access(None, [])), "127.0.0.1", 0, max_message_bytes=1 << 20)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:

        def ask(name: str, request: Any = None, **options: Any) -> Any:
            method = METHODS.get(name, METHODS["ServerLive"])  # one that is not served has no messages
            streams = method.streams or isinstance(request, AsyncIterator)
            make = channel.stream_stream if streams else channel.unary_unary
            call = make(f"/{SERVICE}/{name}", method.request.SerializeToString, method.response.FromString)
            options.setdefault("timeout", TIMEOUT_S)
            return call(method.request() if request is None else request, **options)

        try:
            yield ask
        finally:
            await server.close(0.0)


def run(test: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(test, 4 * TIMEOUT_S))  # type: ignore[arg-type]


def raw(model: str = "m", *arrays: np.ndarray, **fields: Any) -> pb.ModelInferRequest:
    """A request with one input `x`, which travels raw."""
    request = pb.ModelInferRequest(model_name=model, **fields)
    for array in arrays or (np.ones((2, 3), np.float32),):
        request.inputs.add(name="x", datatype="FP32", shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request


def request(num_rows: int = 1, model: str = "m", **fields: Any) -> pb.ModelInferRequest:
    """A request of `num_rows` rows of three zeros, raw, without an array."""
    made = pb.ModelInferRequest(model_name=model, raw_input_contents=[bytes(12 * num_rows)], **fields)
    made.inputs.add(name="x", datatype="FP32", shape=[num_rows, 3])
    return made


async def refused(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def until(predicate: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not predicate():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)
