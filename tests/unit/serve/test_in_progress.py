"""Requests in progress: bodies and their pace, clients that go away, deadlines."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serving.asgi import client
from serving.fake_host import FakeHost, FakeModel
from shoal.errors import InferenceError
from shoal.serve.messages.inference import Disconnected
from shoal.serve.protocol.request_lifecycle import RequestLifecycle, RequestsInProgress
from shoal.serve.protocol.request_limits import RequestLimits

Receive = Callable[[], Awaitable[dict[str, Any]]]
LIMITS = RequestLimits(max_body_bytes=100)
IMPATIENT = RequestLimits(max_body_bytes=100, body_grace_s=0.0, min_body_bytes_per_s=1000)
ROW = b'{"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}'


def body(*chunks: bytes, then: Awaitable[None] | None = None) -> Receive:
    """ASGI's receive: the chunks, and, when nothing follows, the end of the body."""
    left = list(chunks)

    async def receive() -> dict[str, Any]:
        if not left and then is not None:
            await then
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or then is not None}

    return receive


async def read_in(requests: RequestsInProgress, receive: Receive, length_bytes: int | None = None) -> bytes:
    with RequestLifecycle(requests, receive) as progress:
        return await progress.read_body(length_bytes)


def read(receive: Receive, length_bytes: int | None = None, limits: RequestLimits = LIMITS) -> bytes:
    async def run() -> bytes:
        requests = RequestsInProgress(limits, poll_s=0.001)
        return await asyncio.wait_for(read_in(requests, receive, length_bytes), 10.0)

    return asyncio.run(run())


@pytest.mark.parametrize("chunks", [(b"",), (b"all",), (b"a", b"bc", b"d" * 97), (b"", b"", b"x")])
def test_a_body_arrives_whole(chunks: tuple[bytes, ...]) -> None:
    assert read(body(*chunks)) == b"".join(chunks)


def test_a_client_that_goes_away_while_it_sends_is_gone() -> None:
    with pytest.raises(Disconnected):
        read(body(b"x", then=asyncio.sleep(0)))


def test_a_body_that_stalls_is_cut_off() -> None:
    with pytest.raises(InferenceError, match="7 bytes have arrived") as caught:
        read(body(b"x" * 7, then=asyncio.sleep(60)), limits=IMPATIENT)
    assert caught.value.status == 408


def test_a_body_that_trickles_is_cut_off() -> None:
    """Always something, never the end: what comes earns time, but less than it takes."""

    async def trickle() -> dict[str, Any]:
        await asyncio.sleep(0.005)
        return {"type": "http.request", "body": b"x", "more_body": True}

    with pytest.raises(InferenceError, match="too slow"):
        read(trickle, limits=IMPATIENT)


async def test_a_cancelled_request_is_cancelled_and_nothing_of_it_is_left() -> None:
    requests = RequestsInProgress(LIMITS, poll_s=0.001)
    stalled = asyncio.create_task(read_in(requests, body(b"x", then=asyncio.sleep(60))))
    await asyncio.sleep(0)
    stalled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stalled
    assert await read_in(requests, body(b"y")) == b"y"
    assert not requests.running


@pytest.mark.parametrize("leaves", [True, False])
async def test_the_work_of_a_client_that_has_gone_is_cancelled(leaves: bool) -> None:
    """Others, who wait as long, are not disturbed."""

    model = FakeModel()
    model.hold = asyncio.Event()
    caller = client(FakeHost(model))
    gone = asyncio.get_running_loop().create_future()
    stays = asyncio.create_task(caller.call("POST", "/v2/models/m/infer", [ROW]))
    other = client(FakeHost(model))
    goes = asyncio.create_task(other.call("POST", "/v2/models/m/infer", [ROW], then=gone))
    async with asyncio.timeout(10):
        while model.waiting < 2:
            await asyncio.sleep(0)
        if leaves:
            gone.set_result(None)
            with pytest.raises(ValueError, match="unpack"):  # nothing was sent
                await goes
            assert model.waiting == 1
        model.hold.set()
        assert (await stays).status == 200
        if not leaves:
            assert (await goes).status == 200
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def test_the_first_reason_to_end_counts() -> None:
    async def end_twice() -> None:
        with RequestLifecycle(RequestsInProgress(LIMITS), body(b"")) as progress:
            progress.set_deadline(time.monotonic())
            progress.set_deadline(time.monotonic())
            await asyncio.sleep(60)

    with pytest.raises(InferenceError, match="deadline"):
        await end_twice()
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
