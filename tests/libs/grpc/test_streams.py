"""Streams of gRPC that HAProxy hands on in HTTP/1.1, from a client of gRPC; and their messages, piece by piece."""

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest

from libs.grpc import asking
from libs.grpc.asking import raw, request, typed, until
from refusals import refused
from registered import tensors
from serving.fake_host import FakeHost, FakeModel
from serving.replica_server import LIMITS, TIMEOUT_S, exchange, served
from shoal.cluster.ingress.front import is_listening
from shoal.cluster.ports import find_free_port
from shoal.errors import InferenceError
from shoal.libs.grpc import inference_pb2 as pb
from shoal.libs.grpc.app import StreamLifecycle
from shoal.libs.grpc.methods import METHODS, SERVICE
from shoal.libs.grpc.service import STREAM_WINDOW
from shoal.serve.messages.infer_call import Arrays
from shoal.serve.messages.inference import Disconnected
from shoal.serve.protocol.request_lifecycle import CLOSING_MESSAGE, RequestsInProgress
from shoal.serve.protocol.request_limits import RequestLimits
from waiting import wait_for

PATH = f"/{SERVICE}/ModelStreamInfer"
POST = f"POST {PATH} HTTP/1.1"
STREAM = METHODS["ModelStreamInfer"]
SILENCE_S = 1.0  # what the proxy here bears of client and replica where it does not know of streams
IMPATIENT = (
    rf"; s/timeout server .*/timeout server {SILENCE_S:g}s/; s/timeout client 30s/timeout client {SILENCE_S:g}s/"
)
Stream = Callable[..., Any]


@asynccontextmanager
async def opened(host: FakeHost, limits: RequestLimits = LIMITS) -> AsyncIterator[Stream]:
    """`stream(requests, ...)` is a call through HAProxy."""
    async with asking.served(host, limits=limits, edits=IMPATIENT) as ask:
        yield partial(ask, "ModelStreamInfer")


async def collected(call: Any) -> list[pb.ModelStreamInferResponse]:
    return [each async for each in call]


async def test_each_answer_comes_as_soon_as_it_can() -> None:
    async with opened(FakeHost()) as stream:
        call, took_s = stream(), []
        for number in range(50):
            began_s = time.monotonic()
            await call.write(request(2, id=str(number)))
            answer = await call.read()
            assert (answer.infer_response.id, len(answer.infer_response.raw_output_contents[0])) == (str(number), 24)
            took_s.append(time.monotonic() - began_s)
        # A proxy or kernel that waits for more takes 40 ms for each, a machine that others use for one or another.
        assert sorted(took_s)[len(took_s) // 4] < 0.04
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_what_is_sent_at_once_is_in_hand_at_once_and_answered_in_its_order() -> None:
    model = FakeModel()
    async with opened(FakeHost(model)) as stream:
        model.hold = asyncio.Event()
        num_requests = 3 * STREAM_WINDOW
        call = stream(iter([request(id=str(number)) for number in range(num_requests)]))
        answers = asyncio.ensure_future(collected(call))
        await until(lambda: model.waiting == STREAM_WINDOW)
        await asyncio.sleep(0.3)  # longer than the replica's look at what is in progress
        assert model.waiting == STREAM_WINDOW
        model.hold.set()
        assert [each.infer_response.id for each in await answers] == list(map(str, range(num_requests)))


async def test_silence_between_two_messages_is_waited_for() -> None:
    model = FakeModel()
    async with opened(FakeHost(model), limits=replace(LIMITS, body_grace_s=0.2)) as stream:
        call = stream(timeout=None)
        for _ in range(2):
            await call.write(request())
            assert (await call.read()).infer_response.model_name == "m"
            await asyncio.sleep(2 * SILENCE_S)
        model.hold = asyncio.Event()
        await call.write(request())
        await asyncio.sleep(2 * SILENCE_S)
        model.hold.set()
        assert (await call.read()).infer_response.model_name == "m"


async def test_large_messages_and_compressed_ones_are_whole() -> None:
    made = typed("m", "UINT8", [1, 1_000_000], raw_input_contents=[bytes(range(250)) * 4000])
    async with opened(FakeHost(FakeModel("m", tensors(x=("UINT8", [-1, -1]))))) as stream:
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate):
            answers = await collected(stream(iter([made] * 5), compression=compression))
            assert [each.infer_response.raw_output_contents for each in answers] == [made.raw_input_contents] * 5


async def test_an_error_is_an_answer_and_the_stream_goes_on_unless_the_client_wants_a_status() -> None:
    model = FakeModel()
    async with opened(FakeHost(model)) as stream:
        requests = [raw(id="a"), raw("nobody", id="b"), raw(id="c")]
        answers = await collected(stream(iter(requests)))
        assert [each.infer_response.id for each in answers] == ["a", "b", "c"]
        assert [bool(each.error_message) for each in answers] == [False, True, False]
        assert await collected(stream(iter(requests))), "the connection goes on"
        call = stream(iter([]))
        assert (await collected(call), await call.code()) == ([], grpc.StatusCode.OK)
        # Its client would go on sending, but not just then: grpc.aio reports a send that fails in place of the status.
        call = stream(metadata=(("triton_grpc_error", "true"),))
        await call.write(raw(id="a"))
        assert (await call.read()).infer_response.id == "a"
        await call.write(raw("nobody"))
        assert await call.code() is grpc.StatusCode.NOT_FOUND
        assert "no model 'nobody'" in (await call.details() or "")
        call = stream()
        for model.error in (KeyError("x"), None, InferenceError(503, "not yet")):
            await call.write(request())
            message = (await call.read()).error_message
            assert (str(model.error) in message) if model.error else not message


async def test_a_message_that_is_too_large_ends_the_stream() -> None:
    model = FakeModel()
    async with opened(FakeHost(model)) as stream:
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            call = stream(compression=compression)
            await call.write(request())
            assert (await call.read()).infer_response.model_name == "m"
            await call.write(request(LIMITS.max_body_bytes // 12))
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(LIMITS.max_body_bytes) in await call.details()
        assert len(model.calls) == 2


async def written(call: Any, num_requests: int) -> None:
    for _ in range(num_requests):
        await call.write(request())


@pytest.mark.parametrize("how", ["cancelled", "cancelled with a full window", "deadline"])
async def test_what_nobody_waits_for_leaves_the_model(how: str) -> None:
    model = FakeModel()
    async with opened(FakeHost(model)) as stream:
        model.hold = asyncio.Event()
        num_requests = 30 * STREAM_WINDOW if "full" in how else 3
        call = stream(timeout=0.5 if how == "deadline" else None)
        writing = asyncio.ensure_future(written(call, num_requests))
        await until(lambda: model.waiting == min(num_requests, STREAM_WINDOW))
        if how == "deadline":
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            call.cancel()
        await until(lambda: model.waiting == 0)
        assert len(model.calls) == min(num_requests, STREAM_WINDOW)
        await asyncio.gather(writing, return_exceptions=True)


async def test_who_reads_is_answered_however_much_larger_answers_are() -> None:
    """The answers' windows come behind requests for which nobody has room."""
    num_requests = 1500

    def large(inputs: Arrays) -> Arrays:
        return {"y": np.zeros((1, 100_000), np.uint8)}

    async with opened(FakeHost(FakeModel("m", outputs=tensors(y=("UINT8", [-1, -1])), compute=large))) as stream:
        requests = [request(id=str(number)) for number in range(num_requests)]
        num_answers = 0
        async for answer in stream(iter(requests), timeout=None):
            assert answer.infer_response.id == str(num_answers), answer.error_message
            num_answers += 1
        assert num_answers == num_requests


CLOSED = (grpc.StatusCode.UNAVAILABLE, "this replica is closing; begin another stream")


async def test_a_server_that_is_to_end_answers_what_it_has_and_waits_for_no_more() -> None:
    model = FakeModel()
    proxy, http_port = asking.before_a_replica()
    address = f"127.0.0.1:{proxy.grpc_port}"
    async with served(FakeHost(model), http_port) as server, grpc.aio.insecure_channel(address) as channel:
        make = channel.stream_stream(PATH, STREAM.request.SerializeToString, STREAM.response.FromString)
        idle, busy = make(timeout=TIMEOUT_S), make(timeout=TIMEOUT_S)
        await idle.write(request(id="i"))
        assert (await idle.read()).infer_response.id == "i"
        model.hold = asyncio.Event()
        await busy.write(request(id="b"))
        await until(lambda: model.waiting == 1)
        server.should_exit = True
        assert (await idle.code(), await idle.details()) == CLOSED
        assert not busy.done()
        model.hold.set()
        assert (await busy.read()).infer_response.id == "b"
        assert (await busy.code(), await busy.details()) == CLOSED


def serve_until_killed(http_port: int) -> None:
    """In a process of its own."""

    async def main() -> None:
        slow = FakeModel("slow")
        slow.hold = asyncio.Event()
        async with served(FakeHost(FakeModel(), slow), http_port):
            await asyncio.Event().wait()

    asyncio.run(main())


async def test_what_a_killed_replica_had_in_hand_is_unavailable_so_that_a_client_repeats_it() -> None:
    proxy, http_port = asking.before_a_replica(IMPATIENT)
    process = multiprocessing.get_context("spawn").Process(target=serve_until_killed, args=(http_port,), daemon=True)
    process.start()
    wait_for(lambda: is_listening("127.0.0.1", http_port))

    async with grpc.aio.insecure_channel(f"127.0.0.1:{proxy.grpc_port}") as channel:
        make = channel.stream_stream(PATH, STREAM.request.SerializeToString, STREAM.response.FromString)
        infer = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            METHODS["ModelInfer"].request.SerializeToString,
            pb.ModelInferResponse.FromString,
        )
        ended = make(timeout=TIMEOUT_S)
        await ended.write(request())
        await ended.done_writing()
        assert (await ended.read()).infer_response.model_name == "m"
        assert await ended.read() == grpc.aio.EOF
        streams = [make(timeout=TIMEOUT_S) for _ in range(20)]
        for stream in streams:
            for _ in range(2):
                await stream.write(request())
                assert (await stream.read()).infer_response.model_name == "m"
        for stream in streams[:5]:
            await stream.write(request(model="slow"))  # computed when the replica dies
        silent = make(timeout=TIMEOUT_S)
        await silent.write(request(model="slow"))
        unary = infer(request(model="slow"), timeout=TIMEOUT_S)
        await asyncio.sleep(SILENCE_S / 4)
        process.kill()
        for call in (*streams, silent, unary):
            assert await call.code() == grpc.StatusCode.UNAVAILABLE
    process.join()


# -- bodies that no client sends, and who reads nothing ---------------------------------------------------------------

FRAME = b"\0\0\0\0\x03\x0a\x01m"  # a request for the model m, without tensors
WRONG: dict[str, tuple[bytes, str, int, bytes]] = {
    "half a head": (b"\0\0", "", 3, b"the stream ends after 2 bytes of a message"),
    "half a message": (FRAME[:-1], "", 3, b"the stream ends after 7 bytes of a message"),
    "no message of protobuf": (b"\0\0\0\0\x02\xff\xff", "", 3, b"not a ModelInferRequest"),
    "what is not compressed": (b"\1" + FRAME[1:], "grpc-encoding: gzip", 3, b"the body is not gzip"),
    "a length of 4 GB": (b"\0\xff\xff\xff\xff", "", 8, b"the message has 4294967295 bytes"),
    "a timeout that is a word": (FRAME, "grpc-timeout: soon", 3, b"grpc-timeout"),
}


async def test_a_wrong_stream_is_refused() -> None:
    http_port = find_free_port()
    async with served(FakeHost(), http_port):
        for what, (body, header, status, words) in WRONG.items():
            answer = await exchange(http_port, POST, body, header)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), what
            assert b"grpc-status: %d\r\n" % status in answer, what
            assert words in answer, what


@pytest.mark.parametrize("header", ["x: y", "grpc-timeout: 500m"])
async def test_who_takes_no_answers_is_read_no_further_and_has_left_after_a_while(header: str) -> None:
    """Also when the call's deadline has passed by then, and its status is all that is left to say."""
    made = typed("m", "UINT8", [1, 100_000], raw_input_contents=[bytes(100_000)])
    message = made.SerializeToString()
    chunk = b"\0" + len(message).to_bytes(4, "big") + message
    chunk = b"%x\r\n%b\r\n" % (len(chunk), chunk)
    model = FakeModel("m", tensors(x=("UINT8", [-1, -1])))
    http_port = find_free_port()
    async with served(FakeHost(model), http_port, limits=replace(LIMITS, answer_grace_s=1.0)):
        _, writer = await asyncio.open_connection("127.0.0.1", http_port)
        writer.write(f"{POST}\r\nhost: x\r\n{header}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        with suppress(ConnectionError):
            while True:
                writer.write(chunk)
                await asyncio.wait_for(writer.drain(), TIMEOUT_S)
        # A deadline may pass before the window is full.
        assert (STREAM_WINDOW if header == "x: y" else 0) < len(model.calls) < 1000
        writer.close()


# -- the messages of a stream's body, without a socket


NARROW = RequestLimits(max_body_bytes=10_000)
PATIENCE_S = 5.0


def frame(content: bytes) -> bytes:
    return b"\0" + len(content).to_bytes(4, "big") + content


def piece(body: bytes, *, more: bool = True, kind: str = "http.request") -> dict[str, Any]:
    return {"type": kind, "body": body, "more_body": more}


def run(messages: Iterable[dict[str, Any]], work: Callable[[StreamLifecycle], Awaitable[Any]]) -> Any:
    """What `work` makes of a stream of these messages of ASGI, looked at each millisecond."""
    coming = iter(messages)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        found = next(coming, None)
        return await asyncio.Future() if found is None else found

    async def test() -> Any:
        async with asyncio.timeout(PATIENCE_S):
            with StreamLifecycle(RequestsInProgress(NARROW, poll_s=0.001), receive) as progress:
                return await work(progress)

    return asyncio.run(test())


async def contents(progress: StreamLifecycle) -> list[bytes]:
    found = []
    while (each := await progress.read_frame()) is not None:
        found.append(each.content)
    return found


@pytest.mark.parametrize("size", [1, 2, 5, 6, 100])
def test_messages_are_whole_wherever_they_were_cut(size: int) -> None:
    sent = [b"", b"a", bytes(300), b"the last"]
    body = b"".join(map(frame, sent))
    pieces = [piece(body[at : at + size]) for at in range(0, len(body), size)]
    assert run([*pieces, piece(b"", more=False)], contents) == sent


def test_what_nobody_asks_for_is_read_ahead_up_to_a_limit_and_no_further() -> None:
    taken = 0

    def endless() -> Iterable[dict[str, Any]]:
        nonlocal taken
        for number in itertools.count():
            taken += 1
            yield piece(frame(b"%06d" % number) * 10)

    async def work(progress: StreamLifecycle) -> None:
        await progress.read_frame()
        for _ in range(3):  # each time it is looked at again
            await asyncio.sleep(0.05)
            assert taken * 110 < NARROW.max_body_bytes + 1000
        assert taken * 110 >= NARROW.max_body_bytes
        for _ in range(5000):
            assert await progress.read_frame() is not None
        assert len(progress.waits) == 0, "nothing of what was read stays"

    run(endless(), work)


def test_it_is_seen_that_the_client_has_gone_while_nobody_asks() -> None:
    async def work(progress: StreamLifecycle) -> None:
        await progress.read_frame()
        await asyncio.Event().wait()

    messages = [piece(frame(b"a") * 3), piece(frame(b"b") * 3), {"type": "http.disconnect"}]
    with pytest.raises(Disconnected):
        run(messages, work)
    with pytest.raises(Disconnected):
        run([piece(frame(b"a"), more=False), {"type": "http.disconnect"}], work)


def test_a_server_that_is_to_end_begins_nothing_more_of_a_client_that_has_more() -> None:
    with refused(503, "closing"):
        run([piece(frame(b"a") * 3, kind=CLOSING_MESSAGE)], contents)
    last = piece(frame(b"a") * 3, kind=CLOSING_MESSAGE, more=False)
    assert run([last], contents) == [b"a"] * 3


def test_the_rest_of_a_message_has_its_time_and_silence_between_two_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestLimits, "body_deadline_s", lambda self, received_bytes: 0.05)

    async def work(progress: StreamLifecycle) -> None:
        await progress.read_frame()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(progress.read_frame(), 0.2)

    run([piece(frame(b"a"))], work)
    with refused(408, "too slow: 3 bytes"):
        run([piece(frame(b"a") + b"\0\0\0")], contents)
