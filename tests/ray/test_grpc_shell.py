"""What the gRPC shell adds to Serve's server, on that server but without a cluster: deadline, cancellation, limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from serving.fake_host import FakeHost, FakeModel
from serving.grpc_asking import request, until
from shoal.serve.endpoint import EndpointSpec
from shoal.serve.protocol.access import Access
from shoal.serve.protocol.grpc_server import METHODS, NOT_SERVED, SERVICE
from shoal.serve.protocol.grpc_service import InferenceServicer

TIMEOUT_S = 10.0
MAX_BODY_BYTES = 100_000
SPEC = EndpointSpec(name="e", max_body_bytes=MAX_BODY_BYTES)


@pytest.fixture(autouse=True, params=["through Serve", "directly"])
def directly(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether Serve sees the calls; and what a replica changes for its process is put back."""
    from ray.serve._private import constants

    from shoal.serve import ray_grpc

    before = list(constants.DEFAULT_GRPC_SERVER_OPTIONS)
    ray_grpc.limit_messages(MAX_BODY_BYTES)
    yield request.param == "directly"
    constants.DEFAULT_GRPC_SERVER_OPTIONS[:] = before
    ray_grpc._direct.clear()


@asynccontextmanager
async def replica(model: FakeModel, directly: bool) -> AsyncIterator[Callable[..., Any]]:
    """Serve's gRPC server as a replica makes it, around the methods of a deployment; and a client of it."""
    from ray.serve._private.grpc_util import start_grpc_server
    from ray.serve._private.proxy_request_response import gRPCStreamingType
    from ray.serve.grpc_util import RayServegRPCContext

    from shoal.cluster.serve_environment import free_port
    from shoal.serve.ray_grpc import GrpcMethods, answer_directly, grpc_options

    deployment = GrpcMethods()
    deployment.servicer = InferenceServicer(FakeHost(model), Access(None, []))
    seen: list[str] = []
    if directly:
        answer_directly(deployment.servicer)

    def handlers(service_method: str, streaming_type: gRPCStreamingType) -> Any:
        """As the replica does: user code gets Serve's context, and what it set there is copied to the call."""
        method = getattr(deployment, service_method.rpartition("/")[2], None)

        async def one(request: Any, context: Any) -> bytes:
            seen.append(service_method)
            own = RayServegRPCContext(context)
            response = await method(request, grpc_context=own)
            own._set_on_grpc_context(context)
            return bytes(response.SerializeToString())

        async def many(requests: Any, context: Any) -> Any:
            seen.append(service_method)
            own = RayServegRPCContext(context)
            async for response in method(requests, grpc_context=own):
                yield response.SerializeToString()
            own._set_on_grpc_context(context)

        return many if streaming_type is gRPCStreamingType.STREAM_STREAM else one

    port = free_port()
    task, server = await start_grpc_server(handlers, grpc_options(SPEC, port), event_loop=asyncio.get_running_loop())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        def ask(name: str, request: Any, timeout_s: float | None = TIMEOUT_S) -> Any:
            method = METHODS[name]
            make = channel.stream_stream if method.streams else channel.unary_unary
            path = f"/{SERVICE}/{name}"
            return make(path, method.request.SerializeToString, method.response.FromString)(request, timeout=timeout_s)

        ask.channel = channel  # type: ignore[attr-defined]
        try:
            yield ask
        finally:
            await server.stop(0.0)
            await task
    assert not (directly and seen)


def run(test: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(test, 4 * TIMEOUT_S))  # type: ignore[arg-type]


def test_the_client_s_deadline_reaches_the_model(directly: bool) -> None:
    async def test() -> None:
        model = FakeModel()
        async with replica(model, directly) as ask:
            await ask("ModelInfer", request(), timeout_s=100.0)
            assert model.calls[0].deadline_s is not None
            assert 90 < model.calls[0].deadline_s - time.monotonic() < 102
            await ask("ModelInfer", request(), timeout_s=None)
            assert model.calls[1].deadline_s is None
            async for _ in ask("ModelStreamInfer", iter([request()]), timeout_s=50.0):
                assert 40 < (model.calls[2].deadline_s or 0) - time.monotonic() < 52

    run(test())


@pytest.mark.parametrize("name", ["ModelInfer", "ModelStreamInfer"])
def test_a_call_that_is_cancelled_leaves_the_model(name: str, directly: bool) -> None:
    async def test() -> None:
        model = FakeModel()
        model.hold = asyncio.Event()
        async with replica(model, directly) as ask:
            call = ask(name, iter([request()]) if METHODS[name].streams else request())
            await until(lambda: model.waiting == 1)
            call.cancel()
            await until(lambda: model.waiting == 0)

    run(test())


def test_answers_and_errors_have_their_metadata_and_status(directly: bool) -> None:
    async def test() -> None:
        model = FakeModel(versions=(3,))
        async with replica(model, directly) as ask:
            call = ask("ModelInfer", request(2, id="i"))
            answer = await call
            assert (answer.id, answer.model_version) == ("i", "3")
            assert np.frombuffer(answer.raw_output_contents[0], np.float32).size == 6
            assert dict(await call.trailing_metadata())["shoal-model-version"] == "3"
            call = ask("ModelInfer", request(model="nobody"))
            assert await call.code() is grpc.StatusCode.NOT_FOUND
            assert "no model 'nobody'" in await call.details()
            answers = [each async for each in ask("ModelStreamInfer", iter([request(), request(model="nobody")]))]
            assert [bool(each.error_message) for each in answers] == [False, True]

    run(test())


def test_a_message_beyond_the_limit_is_refused_as_it_arrives(directly: bool) -> None:
    async def test() -> None:
        model = FakeModel()
        async with replica(model, directly) as ask:
            call = ask("ModelInfer", request(MAX_BODY_BYTES // 12))
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(MAX_BODY_BYTES) in await call.details()
            assert not model.calls
            assert (await ask("ModelInfer", request())).model_version == "7"

    run(test())


def test_what_is_not_served_says_so_and_reflection_is_off(directly: bool) -> None:
    async def test() -> None:
        async with replica(FakeModel(), directly) as ask:
            for name in NOT_SERVED:
                call = ask.channel.unary_unary(f"/{SERVICE}/{name}")(b"", timeout=TIMEOUT_S)  # type: ignore[attr-defined]
                assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
                assert "is not served" in await call.details()
            path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            call = ask.channel.stream_stream(path)(iter([b""]), timeout=TIMEOUT_S)  # type: ignore[attr-defined]
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED

    run(test())


def test_every_process_that_gets_the_options_listens_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """On their way to Serve's fallback proxy, where nothing else of ours runs, they are copied and pickled."""
    from ray import cloudpickle
    from ray.serve._private.grpc_util import set_proxy_default_grpc_options

    from shoal.serve import ray_grpc

    called: list[bool] = []
    monkeypatch.setattr(ray_grpc, "listen_on_loopback", lambda: called.append(True))
    options: Any = ray_grpc.grpc_options(SPEC, 5)
    for hops in (1, 2):
        options = cloudpickle.loads(cloudpickle.dumps(set_proxy_default_grpc_options(options)))
        assert len(called) == hops
    assert options.port == 5
    assert not options.enable_reflection
