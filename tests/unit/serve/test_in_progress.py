"""Requests in progress: bodies and their pace, clients that go away, deadlines."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from refusals import refused
from serve_template import serves_config
from serving.asgi import client
from serving.fake_host import FakeHost, FakeModel
from shoal.client import AsyncClient, Client
from shoal.client.client import TIMEOUT_S
from shoal.cluster.ingress import haproxy_config, time_limits
from shoal.cluster.ingress.serve_environment import BINARY_VARIABLE, hold_while_asleep, limit_answers, serve_environment
from shoal.errors import ConfigError, InferenceError
from shoal.serve.messages.inference import Disconnected
from shoal.serve.protocol.request_lifecycle import RequestLifecycle, RequestsInProgress
from shoal.serve.protocol.request_limits import RequestLimits
from shoal.serve.spec.endpoint import EndpointSpec

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
    with refused(408, "7 bytes have arrived"):
        read(body(b"x" * 7, then=asyncio.sleep(60)), limits=IMPATIENT)


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


# -- each part of an endpoint waits longer than the one that it waits for

HAPROXYS_MOST_S = (2**31 - 1) / 1000  # it counts milliseconds


def test_each_limit_is_above_those_within_it() -> None:
    limits = time_limits
    # A request that hangs has its 504 before the replica is replaced: it is not sent again, to hang the next one.
    assert (
        limits.HANG_S == limits.ANSWER_S < limits.DRAIN_S
    )  # no request outlives its replica to hang another; a replica that is stopped gives its last answer
    assert max(limits.ANSWER_S, limits.HOLD_S) < TIMEOUT_S  # a client hears what became of its request
    # A request that was sent again each time after the longest wait is answered before its replica's port is another's.
    assert (1 + limits.NUM_RETRIES) * limits.ANSWER_S < limits.PORT_QUARANTINE_S
    longest = (limits.STREAM_SILENCE_S, limits.CHANGE_S, limits.DRAIN_S, limits.PORT_QUARANTINE_S)
    assert max(longest) < limits.HARD_STOP_S < HAPROXYS_MOST_S


@pytest.mark.parametrize(("hang_s", "drain_s"), [(60, 70), (60, 60), (0.25, 0.3), (600, 30)])
def test_the_order_holds_whatever_an_endpoint_says(tmp_path: Path, hang_s: float, drain_s: float) -> None:
    spec = EndpointSpec(name="app", hang_s=hang_s, drain_s=drain_s)
    environment = {BINARY_VARIABLE: str(tmp_path / "haproxy")}
    limit_answers(environment, "app", spec.answer_s)
    for name in ("http-app", "unary-app"):
        (limit,) = [each for each in backend(tmp_path, 1, name) if each.startswith("timeout server")]
        answer_s = float(limit.split()[-1].removesuffix("ms")) / 1000
        assert answer_s == spec.answer_s <= min(spec.hang_s, time_limits.ANSWER_S)
    assert bool(spec.drain_warning) == (drain_s <= answer_s)
    hold_while_asleep(environment, "app", True)  # one that is asleep has a replica to start first
    assert limit in backend(tmp_path, 1)
    assert [each for each in backend(tmp_path, 0) if each.startswith("timeout")] == ["timeout server 60s"]
    limit_answers(environment, "app", None)
    assert limit not in backend(tmp_path, 1)
    with pytest.raises(ConfigError, match="drain_s"):
        EndpointSpec(name="app", drain_s=2 * time_limits.HARD_STOP_S)


def test_the_limits_are_those_that_hold() -> None:
    spec = EndpointSpec(name="one")
    assert (spec.hang_s, spec.drain_s) == (time_limits.HANG_S, time_limits.DRAIN_S)
    for each in (Client, AsyncClient):
        assert inspect.signature(each).parameters["timeout_s"].default == TIMEOUT_S
    variables = serve_environment(Path("s"))
    expected = {
        "HAPROXY_TIMEOUT_SERVER": time_limits.ANSWER_S,
        "HAPROXY_TIMEOUT_CLIENT": time_limits.CLIENT_SILENCE_S,
        "HAPROXY_HARD_STOP_AFTER": time_limits.HARD_STOP_S,
        "PORT_QUARANTINE": time_limits.PORT_QUARANTINE_S,
    }
    assert {name: float(variables[f"RAY_SERVE_{name}_S"]) for name in expected} == expected
    assert variables["RAY_SERVE_HAPROXY_RETRIES"] == str(time_limits.NUM_RETRIES)


def backend(folder: Path, replica_port: int, name: str = "http-app") -> list[str]:
    """The lines of a back end of the application behind a wrapper in `folder`, with Serve's own proxy on port 9."""
    ports = {"grpc_port": 8001, "grpc_replica_port": 2} if name.startswith("unary") else {}
    config = serves_config(folder, 8000, replica_port, fallback_port=9, **ports)
    lines = haproxy_config.rewrite(config, str(folder / "errors")).splitlines()
    rest = lines[lines.index(f"backend {name}") + 1 :] if f"backend {name}" in lines else []
    return [line.strip() for line in takewhile(lambda line: line.startswith(" "), rest)]


def test_who_answers_without_a_replica(tmp_path: Path) -> None:
    """HAProxy uses the first backup; Serve waits for its own to be up."""
    environment = {BINARY_VARIABLE: str(tmp_path / "haproxy")}
    asleep = ["server serve 127.0.0.1:9 check backup"]
    dead = [f"server unavailable unix@{tmp_path}/u.sock no-check backup", *asleep]
    limits = [f"timeout server {time_limits.HOLD_S:g}s", f"errorfile 504 {tmp_path}/errors/late.http"]
    for is_held, last in ((True, asleep), (True, asleep), (False, dead), (False, dead)):
        hold_while_asleep(environment, "app", is_held)
        without, with_replica = backend(tmp_path, 0), backend(tmp_path, 1)
        assert [line for line in without if line.startswith("server ")] == last
        assert [line for line in with_replica if line.startswith("server ")][1:] == last
        assert (set(limits) <= set(without)) == is_held
        assert not set(limits) & set(with_replica)
        quiet = [line for line in backend(tmp_path, 1, "quiet-app") if line.startswith("server ")]
        assert quiet == ([with_replica[-2], dead[0]] if is_held else [])  # never Serve's proxy, which would hold it
    hold_while_asleep(environment, "another", True)
    assert dead[0] in backend(tmp_path, 0)
