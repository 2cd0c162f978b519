"""The gRPC service in this process, behind HAProxy, and a client that asks it as the test says."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import grpc
import numpy as np
import pytest

from serving.fake_host import FakeHost
from serving.haproxy_process import UNCHECKED, HaproxyProcess
from serving.replica_server import LIMITS, TIMEOUT_S
from serving.replica_server import served as replica
from session_end import at_session_end
from shoal.cluster.ports import find_free_port
from shoal.libs.grpc import inference_pb2 as pb
from shoal.libs.grpc.methods import METHODS, SERVICE
from shoal.serve.protocol.access import AccessControl
from shoal.serve.protocol.request_limits import RequestLimits

Ask = Callable[..., Any]


@asynccontextmanager
async def served(
    host: FakeHost, access: AccessControl | None = None, limits: RequestLimits = LIMITS, edits: str = ""
) -> AsyncIterator[Ask]:
    """`ask(method, request, metadata=..., timeout=...)` is a call through HAProxy; those without streams are awaited.

    An asynchronous iterator of requests is sent as a stream, whatever the method takes. edits: of HAProxy's file
    """
    proxy, http_port = before_a_replica(edits)
    async with (
        replica(host, http_port, access, limits),
        grpc.aio.insecure_channel(f"127.0.0.1:{proxy.grpc_port}") as channel,
    ):

        def ask(name: str, request: Any = None, **options: Any) -> Any:
            method = METHODS.get(name, METHODS["ServerLive"])  # one that is not served has no messages
            streams = method.streams or isinstance(request, AsyncIterator)
            make = channel.stream_stream if streams else channel.unary_unary
            call = make(f"/{SERVICE}/{name}", method.request.SerializeToString, method.response.FromString)
            options.setdefault("timeout", TIMEOUT_S)
            return call(request if streams or request is not None else method.request(), **options)

        yield ask


@cache
def before_a_replica(edits: str = "") -> tuple[HaproxyProcess, int]:
    """HAProxy, and the port of the replica's HTTP server that it asks; until the session ends."""
    http_port = find_free_port()
    return at_session_end.enter_context(HaproxyProcess(http_port, find_free_port(), UNCHECKED + edits)), http_port


def raw(model: str = "m", *arrays: np.ndarray, **fields: Any) -> pb.ModelInferRequest:
    """A request with one input `x`, which travels raw."""
    request = pb.ModelInferRequest(model_name=model, **fields)
    for array in arrays or (np.ones((2, 3), np.float32),):
        request.inputs.add(name="x", datatype="FP32", shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request


def request(num_rows: int = 1, model: str = "m", **fields: Any) -> pb.ModelInferRequest:
    """A request of `num_rows` rows of three zeros, raw, without an array."""
    return typed(model, shape=[num_rows, 3], raw_input_contents=[bytes(12 * num_rows)], **fields)


def typed(
    model: str = "m", datatype: str = "FP32", shape: Sequence[int] = (2, 3), **fields: Any
) -> pb.ModelInferRequest:
    """A request with one input `x`, without values."""
    request = pb.ModelInferRequest(model_name=model, **fields)
    request.inputs.add(name="x", datatype=datatype, shape=shape)
    return request


async def refused(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def until(predicate: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not predicate():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)
