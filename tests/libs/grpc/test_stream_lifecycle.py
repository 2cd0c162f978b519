"""The messages of a stream's body, piece by piece, without a socket."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

from shoal.errors import InferenceError
from shoal.libs.grpc.app import StreamLifecycle
from shoal.serve.messages.inference import Disconnected
from shoal.serve.protocol.request_lifecycle import CLOSING_MESSAGE, RequestsInProgress
from shoal.serve.protocol.request_limits import RequestLimits

LIMITS = RequestLimits(max_body_bytes=10_000)
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
            with StreamLifecycle(RequestsInProgress(LIMITS, poll_s=0.001), receive) as progress:
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
            assert taken * 110 < LIMITS.max_body_bytes + 1000
        assert taken * 110 >= LIMITS.max_body_bytes
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
    with pytest.raises(InferenceError, match="closing") as caught:
        run([piece(frame(b"a") * 3, kind=CLOSING_MESSAGE)], contents)
    assert caught.value.status == 503
    last = piece(frame(b"a") * 3, kind=CLOSING_MESSAGE, more=False)
    assert run([last], contents) == [b"a"] * 3


def test_the_rest_of_a_message_has_its_time_and_silence_between_two_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestLimits, "body_deadline_s", lambda self, received_bytes: 0.05)

    async def work(progress: StreamLifecycle) -> None:
        await progress.read_frame()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(progress.read_frame(), 0.2)

    run([piece(frame(b"a"))], work)
    with pytest.raises(InferenceError, match="too slow: 3 bytes") as caught:
        run([piece(frame(b"a") + b"\0\0\0")], contents)
    assert caught.value.status == 408
