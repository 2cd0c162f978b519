"""Calls of gRPC that HAProxy hands on in HTTP/1.1, from a client of gRPC; and what such a client would not send."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import pytest

from serving.fake_host import FakeHost, FakeModel, tensors
from serving.grpc_asking import request, until
from serving.grpc_replica import LIMITS, TIMEOUT_S, exchange, served
from serving.haproxy_process import UNCHECKED, HaproxyProcess
from shoal.cluster.ports import find_free_port
from shoal.errors import InferenceError
from shoal.open_inference import inference_pb2 as pb
from shoal.serve.grpc.methods import METHODS, SERVICE
from shoal.serve.protocol.access import AccessControl
from shoal.serve.protocol.request_limits import RequestLimits

PATH = f"/{SERVICE}/ModelInfer"
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def http_port() -> int:
    return find_free_port()


@pytest.fixture(scope="module")
def proxy(http_port: int) -> Iterator[HaproxyProcess]:
    """Before the port of a replica's HTTP server, and before no gRPC server at all."""
    with HaproxyProcess(http_port, find_free_port(), UNCHECKED) as started:
        yield started


def run(host: FakeHost, proxy: HaproxyProcess, http_port: int, test: Callable[[Ask], Awaitable[None]]) -> None:
    """`test(ask)`; `ask(request, ...)` is a call of ModelInfer through HAProxy."""

    async def main() -> None:
        async with (
            served(host, http_port),
            grpc.aio.insecure_channel(f"127.0.0.1:{proxy.grpc_port}") as channel,
        ):
            infer = METHODS["ModelInfer"]
            make = channel.unary_unary(PATH, infer.request.SerializeToString, infer.response.FromString)

            def ask(request: pb.ModelInferRequest, timeout: float | None = TIMEOUT_S, **options: Any) -> Any:
                return make(request, timeout=timeout, **options)

            await asyncio.wait_for(test(ask), 2 * TIMEOUT_S)

    asyncio.run(main())


def test_a_call_is_answered_with_its_metadata(proxy: HaproxyProcess, http_port: int) -> None:
    model = FakeModel(versions=(3,))

    async def test(ask: Ask) -> None:
        for number in range(5):  # on one connection
            call = ask(request(2, id=str(number)), metadata=(("shoal-sticky", "s"),))
            answer = await call
            assert (answer.id, answer.model_version, len(answer.raw_output_contents[0])) == (str(number), "3", 24)
            assert dict(await call.trailing_metadata()) == {"shoal-model-version": "3"}
        assert {each.sticky for each in model.calls} == {"s"}
        answers = await asyncio.gather(*(ask(request(id=str(number))) for number in range(50)))
        assert [answer.id for answer in answers] == [str(number) for number in range(50)]

    run(FakeHost(model), proxy, http_port, test)


def test_a_large_call_is_answered_whole(proxy: HaproxyProcess, http_port: int) -> None:
    async def test(ask: Ask) -> None:
        made = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(range(250)) * 4000])
        made.inputs.add(name="x", datatype="UINT8", shape=[1, 1_000_000])
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate):
            answer = await ask(made, compression=compression)
            assert answer.raw_output_contents[0] == made.raw_input_contents[0]

    run(FakeHost(FakeModel("m", tensors(x=("UINT8", [-1, -1])))), proxy, http_port, test)


def test_a_compressed_call_is_unpacked_beside_the_loop(
    proxy: HaproxyProcess, http_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decompress, threads = RequestLimits.decompress, list[threading.Thread]()

    def watched(limits: RequestLimits, body: bytes, encoding: bytes) -> bytes:
        threads.append(threading.current_thread())
        return decompress(limits, body, encoding)

    async def test(ask: Ask) -> None:
        await ask(request(64), compression=grpc.Compression.Gzip)
        assert len(threads) == 1
        assert threading.current_thread() not in threads

    monkeypatch.setattr(RequestLimits, "decompress", watched)
    run(FakeHost(), proxy, http_port, test)


REFUSALS = [
    (InferenceError(422, "input 'K\u00f6ln': 100% wrong\nand more"), grpc.StatusCode.INVALID_ARGUMENT),
    (InferenceError(429, "full", retry_after_s=1.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (InferenceError(503, "not yet"), grpc.StatusCode.UNAVAILABLE),
    (RuntimeError("a bug"), grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("error", "code"), REFUSALS, ids=[code.name for _, code in REFUSALS])
def test_a_refusal_keeps_its_words(
    error: Exception, code: grpc.StatusCode, proxy: HaproxyProcess, http_port: int
) -> None:
    model = FakeModel()
    model.error = error

    async def test(ask: Ask) -> None:
        call = ask(request())
        assert await call.code() is code
        assert str(error) in await call.details()
        retry_after = dict(await call.trailing_metadata()).get("retry-after")
        assert retry_after == ("2" if code is grpc.StatusCode.RESOURCE_EXHAUSTED else None)

    run(FakeHost(model), proxy, http_port, test)


def test_what_is_too_large_is_refused(proxy: HaproxyProcess, http_port: int) -> None:
    model = FakeModel()

    async def test(ask: Ask) -> None:
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            call = ask(request(LIMITS.max_body_bytes // 12), compression=compression)
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(LIMITS.max_body_bytes) in await call.details()
        assert not model.calls
        assert await ask(request())

    run(FakeHost(model), proxy, http_port, test)


def test_the_deadline_is_the_call_s(proxy: HaproxyProcess, http_port: int) -> None:
    model = FakeModel()

    async def test(ask: Ask) -> None:
        await ask(request(), timeout=100.0)
        assert model.calls[-1].deadline_s is not None
        assert 90 < model.calls[-1].deadline_s - time.monotonic() < 102
        await ask(request(), timeout=None)
        assert model.calls[-1].deadline_s is None
        model.hold = asyncio.Event()
        assert await ask(request(), timeout=0.3).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: model.waiting == 0)

    run(FakeHost(model), proxy, http_port, test)


def test_a_call_that_is_cancelled_leaves_the_model(proxy: HaproxyProcess, http_port: int) -> None:
    model = FakeModel()
    model.hold = asyncio.Event()

    async def test(ask: Ask) -> None:
        call = ask(request())
        await until(lambda: model.waiting == 1)
        call.cancel()
        await until(lambda: model.waiting == 0)

    run(FakeHost(model), proxy, http_port, test)


# -- what no client of gRPC sends -------------------------------------------------------------------------------------

FRAME = b"\0\0\0\0\x03\x0a\x01m"  # a request for the model m, without tensors
POST = f"POST {PATH} HTTP/1.1"
# what it is -> first line, body, header, the status of gRPC and words of the answer
WRONG: dict[str, tuple[str, bytes, str, int, bytes]] = {
    "an empty body": (POST, b"", "", 3, b"not one message"),
    "half a head": (POST, b"\0\0", "", 3, b"not one message"),
    "half a message": (POST, FRAME[:-1], "", 3, b"not one message"),
    "two messages": (POST, FRAME + FRAME, "", 3, b"not one message"),
    "no message of protobuf": (POST, b"\0\0\0\0\x02\xff\xff", "", 3, b"not a ModelInferRequest"),
    "what is not compressed": (POST, b"\1" + FRAME[1:], "grpc-encoding: gzip", 3, b"the body is not gzip"),
    "an unknown compression": (POST, b"\1" + FRAME[1:], "grpc-encoding: zstd", 12, b"not supported"),
    "a timeout that is a word": (POST, FRAME, "grpc-timeout: soon", 3, b"grpc-timeout"),
    "no tensors": (POST, FRAME, "grpc-timeout: 5S", 3, b"input 'x' is missing"),
    "another method of HTTP": (f"GET {PATH} HTTP/1.1", FRAME, "", 12, b"not served here"),
    "no method of the service": (f"POST /{SERVICE}/Nothing HTTP/1.1", FRAME, "", 12, b"not served here"),
}


def test_a_wrong_call_is_refused(http_port: int) -> None:
    async def test() -> None:
        async with served(FakeHost(), http_port):
            for what, (line, body, header, status, words) in WRONG.items():
                answer = await exchange(http_port, line, body, header)
                assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), what
                assert b"content-length: 0\r\n" in answer, what
                assert b"grpc-status: %d\r\n" % status in answer, (what, answer)
                assert words in answer, (what, answer)
            live = await exchange(http_port, "GET /v2/health/live HTTP/1.1", b"", "")
            assert live.endswith(b'{"live":true}'), "other paths are REST's"

    asyncio.run(test())


def test_nothing_is_read_of_a_call_without_a_key(http_port: int) -> None:
    async def test() -> None:
        async with served(FakeHost(), http_port, AccessControl("a-token", [])):
            for header, status in (("", 16), ("authorization: Bearer other", 16), (f"x: {'x' * 9000}", 8)):
                reader, writer = await asyncio.open_connection("127.0.0.1", http_port)
                head = [POST, "host: x", "connection: close", "content-length: 5000", *filter(None, [header]), "", ""]
                writer.write("\r\n".join(head).encode())
                answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)
                writer.close()
                assert b"grpc-status: %d\r\n" % status in answer, answer

    asyncio.run(test())


def test_a_deadline_is_kept_by_the_replica_too(http_port: int) -> None:
    """The client, and HAProxy, may go on waiting."""
    model = FakeModel()
    model.hold = asyncio.Event()
    message = request().SerializeToString()

    async def test() -> None:
        async with served(FakeHost(model), http_port):
            body = b"\0" + len(message).to_bytes(4, "big") + message
            answer = await exchange(http_port, POST, body, "grpc-timeout: 200m")
            assert b"grpc-status: 4\r\n" in answer
            assert model.waiting == 0

    asyncio.run(test())


def test_a_deadline_of_ages_is_none(http_port: int) -> None:
    model = FakeModel()
    message = request().SerializeToString()

    async def test() -> None:
        async with served(FakeHost(model), http_port):
            body = b"\0" + len(message).to_bytes(4, "big") + message
            for timeout, is_kept in (("99999999S", True), ("99999999H", False)):
                assert b"grpc-status: 0\r\n" in await exchange(http_port, POST, body, f"grpc-timeout: {timeout}")
                assert (model.calls[-1].deadline_s is not None) is is_kept

    asyncio.run(test())
