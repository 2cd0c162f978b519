"""The way of a request past Serve, on a real uvicorn and real sockets; `served` stands for Serve's own application."""

import ast
import asyncio
import contextlib
import gc
import inspect
import json
import re
import socket
import struct
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import uvicorn
import uvicorn.config
from uvicorn.protocols.http import httptools_impl

from shoal.serve.http import direct_protocol, fast_path
from waiting import wait_for

LARGE = 3_000_000


class Echo:
    """Answers what it got; `/slow` waits until `release` or until its client has gone, `/refuse` for nothing."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.num_slow = 0
        self.departed = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while scope["path"] != "/refuse":
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        if scope["path"] == "/raise":
            raise RuntimeError("on purpose")
        if scope["path"] == "/slow":
            self.num_slow += 1
            await self._wait(receive)
        told = {"path": scope["path"], "query": scope["query_string"].decode(), "method": scope["method"]}
        answer = body if scope["path"] == "/same" else json.dumps({**told, "body": body.decode()[:100]}).encode()
        is_stream = scope["path"] == "/stream"
        headers = [] if is_stream else [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in (b"a" * 70_000, b"", b"b") if is_stream else ():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"" if is_stream else answer})

    async def _wait(self, receive: Any) -> None:
        departure = asyncio.ensure_future(receive())
        released = asyncio.ensure_future(self.release.wait())
        await asyncio.wait([departure, released], return_when=asyncio.FIRST_COMPLETED)
        self.departed = departure.done() and departure.result()["type"] == "http.disconnect"
        departure.cancel()
        released.cancel()


async def served(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"serve"})


class Running:
    """A server in a thread of its own."""

    def __init__(self) -> None:
        self.echo = Echo()
        fast_path.install_application(self.echo)
        self.server = uvicorn.Server(
            uvicorn.Config(served, port=0, lifespan="off", log_level="critical", timeout_keep_alive=60)
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        wait_for(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def _run(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.server.serve())
        self.loop.close()

    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def line(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 60)

    def release(self) -> None:
        self.loop.call_soon_threadsafe(self.echo.release.set)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", uvicorn.config.HTTP_PROTOCOLS["auto"])
    running = Running()
    yield running
    with contextlib.suppress(RuntimeError):  # its loop is closed already
        running.release()
    running.server.should_exit = True
    running.thread.join(60)
    assert not running.thread.is_alive()


def test_requests_reach_the_application_on_one_connection(running: Running) -> None:
    with running.client() as client:
        for number in range(3):
            answer = client.post("/v2/models/m/infer?a=1", content=f"{number}")
            expected = {"path": "/v2/models/m/infer", "query": "a=1", "method": "POST", "body": str(number)}
            assert answer.json() == expected
            assert "date" in answer.headers


def test_what_is_serves_own_goes_to_serve(running: Running) -> None:
    with running.client() as client:
        assert client.get("/-/healthz").text == "serve"
        assert client.get("/v2").json()["method"] == "GET"
        assert client.get("/-/healthz").text == "serve"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_comes_and_goes_whole(running: Running, chunked: bool) -> None:
    body = bytes(range(256)) * (LARGE // 256)
    with running.client() as client:
        answer = client.post("/same", content=iter([body[:1000], body[1000:]]) if chunked else body)
    assert answer.content == body


def test_an_answer_without_a_length_comes_in_chunks(running: Running) -> None:
    with running.client() as client:
        for _ in range(2):  # the connection remains
            answer = client.get("/stream")
            assert answer.headers["transfer-encoding"] == "chunked"
            assert answer.content == b"a" * 70_000 + b"b"


def test_pipelined_requests_are_answered_in_order(running: Running) -> None:
    request = "POST /{} HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n{}"
    requests = request.format("slow", 0) + request.format("same", 1) + request.format("same", 2)
    with running.line() as line:
        line.sendall(requests.encode() + b"GET /-/routes HTTP/1.1\r\n\r\n")
        wait_for(lambda: running.echo.num_slow)
        running.release()
        received = b""
        while received.count(b"200 OK") < 4 or not received.endswith(b"serve"):
            received += line.recv(65536)
    bodies = [part.split(b"\r\n\r\n")[1] for part in received.split(b"HTTP/1.1 200 OK")[1:]]
    assert json.loads(bodies[0])["path"] == "/slow"
    assert bodies[1:] == [b"1", b"2", b"serve"]


def test_an_application_that_raises_ends_the_connection_and_no_other(running: Running) -> None:
    with running.client() as client:
        with pytest.raises(httpx2.RemoteProtocolError):
            client.post("/raise")
        assert client.get("/v2").status_code == 200


def test_head_gets_no_body_and_close_is_kept_to(running: Running) -> None:
    with running.line() as line:
        line.sendall(b"HEAD /v2 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        received = b""
        while data := line.recv(65536):
            received += data
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert body == b""


def test_a_client_that_goes_away_is_told_of(running: Running) -> None:
    with running.line() as line:
        line.sendall(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        wait_for(lambda: running.echo.num_slow)
    wait_for(lambda: running.echo.departed)


def test_a_server_that_is_told_to_stop_answers_what_it_has(running: Running) -> None:
    with running.line() as line:
        line.sendall(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        wait_for(lambda: running.echo.num_slow)
        running.server.should_exit = True
        wait_for(lambda: not running.server.servers[0].is_serving())
        running.release()
        received = b""
        while data := line.recv(65536):
            received += data
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert b"connection: close" in received


def test_a_connection_that_was_reset_leaves_nothing_behind(running: Running) -> None:
    """uvicorn keeps it until its keep-alive timer ends; HAProxy resets those that it does not need."""
    with running.line() as line:
        line.sendall(b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert line.recv(4096)
        (protocol,) = map(weakref.ref, running.server.server_state.connections)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def nothing_is_left() -> bool:  # the server's own thread may still be in the call that lets go of it
        gc.collect()
        return protocol() is None

    wait_for(nothing_is_left)


def test_an_idle_connection_is_closed_and_none_whose_answer_is_in_progress(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_protocol.DirectProtocol, "timeout_keep_alive", 0.2, raising=False)
    monkeypatch.setattr(httptools_impl.HttpToolsProtocol, "__setattr__", _set_all_but_keep_alive, raising=False)
    with running.line() as line:
        line.sendall(b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert line.recv(65536).startswith(b"HTTP/1.1 200 OK")
        (protocol,) = running.server.server_state.connections
        line.sendall(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        wait_for(lambda: running.echo.num_slow)
        wait_for(lambda: protocol._idle is None)  # it was looked at
        running.release()
        assert line.recv(65536).startswith(b"HTTP/1.1 200 OK")
        assert line.recv(65536) == b""


def _set_all_but_keep_alive(protocol: object, name: str, value: object) -> None:
    if name != "timeout_keep_alive":
        object.__setattr__(protocol, name, value)


@pytest.mark.parametrize("closes", [b"", b"connection: close\r\n"])
def test_who_was_refused_does_not_stay_by_sending_on(
    running: Running, monkeypatch: pytest.MonkeyPatch, closes: bytes
) -> None:
    """A byte at a time, of a body that nobody reads, keeps every timeout of inactivity quiet."""
    monkeypatch.setattr(direct_protocol, "UNREAD_BODY_TIMEOUT_S", 0.2)
    with running.line() as line:
        line.sendall(b"POST /refuse HTTP/1.1\r\nhost: x\r\n" + closes + b"content-length: 100000000\r\n\r\n")
        assert line.recv(65536).startswith(b"HTTP/1.1 200 OK")

        def is_left() -> bool:
            try:
                line.sendall(b"x")
            except OSError:
                return True
            return False

        wait_for(is_left)
    wait_for(lambda: not running.server.server_state.connections)


def test_who_was_refused_and_asks_again_is_answered(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_protocol, "UNREAD_BODY_TIMEOUT_S", 0.2)
    with running.line() as line:
        line.sendall(b"POST /refuse HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n")
        assert line.recv(65536).startswith(b"HTTP/1.1 200 OK")
        (protocol,) = running.server.server_state.connections
        line.sendall(b"0POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        wait_for(lambda: running.echo.num_slow)
        wait_for(lambda: protocol._unread.when() < running.loop.time())
        running.release()
        assert json.loads(line.recv(65536).partition(b"\r\n\r\n")[2])["path"] == "/slow"


def test_what_is_used_of_uvicorn_is_what_is_looked_for() -> None:
    """Every attribute of a connection that the class reads, and does not define, is in the list, and nothing else."""
    source = ast.parse(inspect.getsource(direct_protocol.DirectProtocol))
    used = {
        node.attr
        for node in ast.walk(source)
        if isinstance(node, ast.Attribute)
        and (isinstance(node.value, ast.Call) or (isinstance(node.value, ast.Name) and node.value.id == "self"))
    }
    own = {"_start", "_check_idle", "_idle", "_idle_since_s", "_leave", "_unread", "cancel"}
    calls_of_a_parser = {"get_method", "decode"}
    used_by_a_cycle = {"on_response_complete"}
    assert (used - own - calls_of_a_parser) | used_by_a_cycle == direct_protocol.USED_OF_UVICORN


@pytest.mark.parametrize("name", ["cycle", "on_response_complete", "pipeline"])
def test_a_uvicorn_that_lacks_something_is_used_in_the_plain_way(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = inspect.getsource(httptools_impl.HttpToolsProtocol)
    other: dict[str, Any] = {}
    code = compile(
        re.sub(rf"\b{name}\b", f"{name}_renamed", source), httptools_impl.__file__, "exec", dont_inherit=True
    )
    exec(code, {**vars(httptools_impl), "__name__": httptools_impl.__name__}, other)
    fake = other["HttpToolsProtocol"]
    monkeypatch.setattr(httptools_impl, "HttpToolsProtocol", fake)
    monkeypatch.setattr(inspect, "getsource", lambda _: source)
    assert_plain(f"has no {name}", monkeypatch, caplog)


def test_a_uvicorn_that_uses_more_of_a_request_or_has_no_such_class_is_used_in_the_plain_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = inspect.getsource(httptools_impl.HttpToolsProtocol).replace("cycle.body", "cycle.chunks")
    with monkeypatch.context() as changed:
        changed.setattr(inspect, "getsource", lambda _: source)
        assert_plain("uses chunks of a request", changed, caplog)
    caplog.clear()
    monkeypatch.delattr(httptools_impl, "HttpToolsProtocol")
    assert_plain("HttpToolsProtocol is not there", monkeypatch, caplog)


def assert_plain(problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One warning, and uvicorn serves with the protocol that it would have without us."""
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", "uvicorns.own:Protocol")
    with caplog.at_level("WARNING"):
        assert not fast_path.install_application(served)
    assert [problem in record.getMessage() for record in caplog.records] == [True]
    assert uvicorn.config.HTTP_PROTOCOLS["auto"] == "uvicorns.own:Protocol"
