"""What a request may cost: heads, bodies and their pace, shapes, compression."""

import asyncio
import gzip
import math
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InferenceError
from shoal.serve.bodies import BodyReader
from shoal.serve.disconnects import Disconnected
from shoal.serve.limits import Limits

Receive = Callable[[], Awaitable[dict[str, Any]]]
LIMITS = Limits(max_body_bytes=100, max_headers=3, max_header_bytes=40, max_path_chars=10, max_elements=1000)
IMPATIENT = Limits(max_body_bytes=100, body_grace_s=0.0, min_body_bytes_per_s=1000)


def refused(call: Callable[[], object]) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        call()
    return caught.value


def body(*chunks: bytes, then: Awaitable[None] | None = None) -> Receive:
    """ASGI's receive: the chunks, and, when nothing follows, the end of the body."""
    left = list(chunks)

    async def receive() -> dict[str, Any]:
        if not left and then is not None:
            await then
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or then is not None}

    return receive


def read(receive: Receive, length_bytes: int = -1, limits: Limits = LIMITS, look_s: float = 0.001) -> bytes:
    async def run() -> bytes:
        return await asyncio.wait_for(BodyReader(limits, look_s).read(receive, length_bytes), 10.0)

    return asyncio.run(run())


def test_a_head_within_its_limits_passes_and_each_limit_has_its_status() -> None:
    headers = [(b"a", b"b" * 10)] * 3
    LIMITS.check_head("/v2/health", headers)
    assert refused(lambda: LIMITS.check_head("/v2/health/", headers)).status == 414
    assert refused(lambda: LIMITS.check_head("/", [*headers, (b"", b"")])).status == 431
    error = refused(lambda: LIMITS.check_head("/", [(b"a", b"b" * 40)]))
    assert error.status == 431
    assert "41 bytes" in str(error)


@given(st.lists(st.integers(0, 1 << 62), max_size=8))
def test_no_shape_has_more_elements_than_allowed(shape: list[int]) -> None:
    if math.prod(shape) <= LIMITS.max_elements:
        assert LIMITS.check_shape("x", shape) == math.prod(shape)
    else:
        error = refused(lambda: LIMITS.check_shape("x", shape))
        assert error.status == 413
        assert "'x'" in str(error)


def test_a_negative_size_is_not_a_shape() -> None:
    assert refused(lambda: LIMITS.check_shape("x", [-1, -5])).status == 422


@pytest.mark.parametrize("chunks", [(b"",), (b"all",), (b"a", b"bc", b"d" * 97), (b"", b"", b"x")])
def test_a_body_arrives_whole(chunks: tuple[bytes, ...]) -> None:
    assert read(body(*chunks)) == b"".join(chunks)


def test_a_body_too_large_is_refused_before_it_is_read() -> None:
    async def never() -> dict[str, Any]:
        raise AssertionError("was read")

    assert refused(lambda: read(never, 101)).status == 413


@pytest.mark.parametrize("chunks", [(b"x" * 101,), (b"x" * 60, b"x" * 60, b"x" * 60)])
def test_a_body_that_turns_out_too_large_is_refused(chunks: tuple[bytes, ...]) -> None:
    assert refused(lambda: read(body(*chunks))).status == 413


def test_a_client_that_goes_away_while_it_sends_is_gone() -> None:
    with pytest.raises(Disconnected):
        read(body(b"x", then=asyncio.sleep(0)))


def test_a_body_that_stalls_is_cut_off() -> None:
    error = refused(lambda: read(body(b"x" * 7, then=asyncio.sleep(60)), limits=IMPATIENT))
    assert error.status == 408
    assert "7 bytes have arrived" in str(error)


def test_a_body_that_trickles_is_cut_off() -> None:
    """Always something, never the end: what comes earns time, but less than it takes."""

    async def trickle() -> dict[str, Any]:
        await asyncio.sleep(0.005)
        return {"type": "http.request", "body": b"x", "more_body": True}

    assert refused(lambda: read(trickle, limits=IMPATIENT)).status == 408


def test_what_arrives_fast_enough_has_time() -> None:
    assert LIMITS.body_deadline_s(0) == 10.0
    assert LIMITS.body_deadline_s(32 * 1024 * 6) == 16.0


def test_a_cancelled_reader_is_cancelled_and_nobody_is_left() -> None:
    async def run() -> None:
        reader = BodyReader(LIMITS, look_s=0.001)
        stalled = asyncio.create_task(reader.read(body(b"x", then=asyncio.sleep(60)), -1))
        await asyncio.sleep(0)
        stalled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stalled
        assert await reader.read(body(b"y"), -1) == b"y"
        assert not reader._reading

    asyncio.run(run())


@pytest.mark.parametrize(("encoding", "compress"), [(b"gzip", gzip.compress), (b"Deflate", zlib.compress)])
def test_compressed_bodies(encoding: bytes, compress: Callable[[bytes], bytes]) -> None:
    assert LIMITS.decompress(compress(b"x" * 100), encoding) == b"x" * 100
    assert refused(lambda: LIMITS.decompress(compress(b"x" * 10_000_000), encoding)).status == 413
    assert refused(lambda: LIMITS.decompress(compress(b"x" * 100)[:-6], encoding)).status == 400
    assert refused(lambda: LIMITS.decompress(b"no such thing", encoding)).status == 400


def test_another_encoding_is_refused() -> None:
    error = refused(lambda: LIMITS.decompress(b"", b"br"))
    assert error.status == 415
    assert "'br'" in str(error)
