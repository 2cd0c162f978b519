"""One connection of a replica that answers at HAProxy's own port, in memory, by a clock of the test's."""

import asyncio
import mmap
import os
import resource
import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import uvicorn
from uvicorn.server import ServerState

from shoal.cluster.ingress import connection_guard
from shoal.cluster.ingress.connection_guard import ConnectionGuard
from shoal.serve.http.direct_protocol import DirectProtocol
from shoal.serve.http.front_protocol import SPARE_FILES, DirectFront, FrontProtocol
from shoal.serve.http.stream_guard import StreamGuard
from waiting import wait_for

ANSWER_S = 60.0


class Line:
    """A connection and its client: `told` has what the client gets, `returned` what HAProxy does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told = b""
        self.returned = list[bytes]()
        self.asked = list[Any]()
        self.is_closed, self.num_unread = False, 0
        self.marks = list[tuple[int, int, int]]()
        self.resume = asyncio.Event()
        guard = SimpleNamespace(
            is_alive=True,
            flush=lambda: True,
            mark_idle=lambda *counts: self.marks.append(counts),
            return_connection=lambda _, read: self.returned.append(read),
            release=lambda _: None,
        )
        self.front: Any = SimpleNamespace(guard=guard, connections=set(), is_leaving=False, answer_s=ANSWER_S)
        self.server = SimpleNamespace(
            config=uvicorn.Config(self.answer, lifespan="off", log_level="critical"),
            server_state=ServerState(),
            lifespan=SimpleNamespace(state={}),
        )
        monkeypatch.setattr(DirectProtocol, "application", self.answer, raising=False)
        connection: Any = SimpleNamespace(shutdown=lambda _: None)
        self.protocol = FrontProtocol(self.front, self.server, connection, 0)
        transport: Any = SimpleNamespace(
            **dict.fromkeys(("abort", "close", "write_eof"), self._close),
            **dict.fromkeys(("pause_reading", "resume_reading"), lambda: None),
            write=self._write,
            get_extra_info=lambda name, default=None: ("192.0.2.7", 4000) if name == "peername" else default,
            get_write_buffer_size=lambda: self.num_unread,
            is_closing=lambda: self.is_closed,
        )
        self.protocol.connection_made(transport)

    def _close(self) -> None:
        self.is_closed = True

    def _write(self, data: bytes) -> None:
        self.told += data

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        """With three parts for `/parts`, each once `resume` is set; else with none."""
        self.asked.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(3 if scope["path"] == "/parts" else 0):
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
            await self.resume.wait()
            self.resume.clear()
        await send({"type": "http.response.body"})

    async def send(self, data: bytes) -> None:
        self.protocol.data_received(data)
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_more_clients_than_the_process_may_have_files_for_are_haproxys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (SPARE_FILES + 2, 0))
    line = Line(monkeypatch)
    line.front.guard.hold = lambda _: 0
    front = DirectFront(line.server, line.front.guard, ANSWER_S)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        front.listen(listener)
        async with asyncio.timeout(30):
            while not (line.returned and len(front.connections) == 2):
                await asyncio.sleep(0)
        front.stop_listening(listener)
    assert line.returned == [b""]
    front.close()
    [each.close() for each in clients]
    await settle()


async def test_an_answer_that_comes_in_parts_may_take_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch)
    await line.send(b"GET /parts HTTP/1.1\r\nhost: a\r\n\r\n")
    now_s = asyncio.get_running_loop().time()
    for part in range(1, 3):
        line.protocol.check(now_s + part * ANSWER_S)
        line.resume.set()
        await settle()
    line.protocol.check(now_s + 3 * ANSWER_S)
    assert not line.is_closed
    line.protocol.check(now_s + 4 * ANSWER_S + 1)
    assert line.is_closed
    assert line.told.count(b"HTTP/1.1") == 1, "no other answer within it"


async def test_half_of_the_next_head_ends_no_request_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch)
    half = b"GET /b HTTP/1.1\r\nx: y"
    await line.send(b"GET /parts HTTP/1.1\r\nhost: a\r\n\r\n" + half)
    now_s = asyncio.get_running_loop().time()
    for later_s in (1.0, 30.0):
        line.protocol.check(now_s + later_s)
    assert not line.is_closed
    for _ in range(3):
        line.resume.set()
        await settle()
    line.protocol.check(now_s + 31.0)
    assert line.told.count(b"HTTP/1.1 200") == 1
    assert line.returned == [half]


async def test_a_request_in_pieces_is_awaited_until_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch)
    head = b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: 40000\r\n\r\n"
    for piece in (head[:9], head[9:], bytes(30_000)):
        await line.send(piece)
        assert not line.asked
    await line.send(bytes(9_000))
    assert line.asked, "HAProxy, too, waits for 32 kB"
    line.protocol.check(0.0)
    await line.send(bytes(1_000) + head)
    assert not line.returned
    line.protocol.check(0.0)
    assert line.returned == [head]


async def test_no_answer_is_cut_by_the_return_of_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch)
    request = b"GET /a HTTP/1.1\r\nhost: a\r\n\r\n"
    await line.send(request)
    line.front.is_leaving, line.num_unread = True, 1
    await line.send(request)
    assert line.told.count(b"HTTP/1.1 200") == 2
    assert not line.returned


async def test_a_client_that_reads_nothing_is_ended_whatever_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch)
    line.num_unread = 1
    now_s = asyncio.get_running_loop().time()
    for later_s, sent in ((1.0, b"GET /a HTTP/1.1\r\nhost: a\r\n\r\nG"), (30.0, b"E"), (32.0, b"T \r\n\r\n")):
        assert not line.is_closed
        await line.send(sent)
        line.protocol.check(now_s + later_s)
    assert line.is_closed
    assert line.protocol.flow.read_paused, "nothing that it sends can be answered"
    assert line.told.count(b"HTTP/1.1 200") == 1
    assert not line.returned


async def test_a_request_that_is_answered_early_leaves_the_connection_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch)
    request = b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: 40000\r\n\r\n" + bytes(40_000)
    await line.send(request[:-1])
    assert line.told.startswith(b"HTTP/1.1 200")
    await line.send(request[-1:])
    assert line.marks == [(0, len(request), len(line.told))]


class Haproxy:
    """Where a guard returns connections to, in the present folder."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(connection_guard.RETURN_SOCKET)
        self.socket.listen(1)
        self.socket.settimeout(30)

    def answer(self, num: int) -> bytes:
        """The first bytes of a connection after the line of PROXY."""
        line, _ = self.socket.accept()
        with line, line.makefile("rb") as stream:
            assert stream.readline().startswith(b"PROXY TCP")
            asked = stream.read(num)
            line.sendall(b"answered")
        return asked

    def close(self) -> None:
        self.socket.close()


# What a replica does before it is killed: "read" a request, "mark" what will have been read and written at its end,
# "write" its answer, or "part" of it. Then what its client gets.
@pytest.mark.parametrize(
    ("deeds", "gets"),
    [
        ("", b"answered"),
        ("read", b"HTTP/1.1 503"),
        ("read mark", b"HTTP/1.1 503"),
        ("read mark part", b""),
        ("mark write", b"HTTP/1.1 503"),  # an answer to a body that has not come
        ("read mark write", b"answered"),  # before it knew that it had written
        ("read mark write read", b"HTTP/1.1 503"),
        ("read mark write read mark", b"HTTP/1.1 503"),
        ("read part", b""),
        ("read mark write read mark write read mark write", b"answered"),
        ("read mark write read mark write read part", b""),
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_client_of_a_killed_replica_gets(
    deeds: str, gets: bytes, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    request = b"a request"
    answer = b"an answer"
    counts = [0, 0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(Haproxy()) as haproxy, socket.create_server((host, 0), family=family) as listener:
        guard = ConnectionGuard(Path(), "127.0.0.1:1")
        with socket.create_connection(listener.getsockname()[:2], 30) as client, listener.accept()[0] as accepted:
            number = guard.hold(accepted)
            for deed in deeds.split():
                if deed == "read":
                    client.sendall(request)
                    assert accepted.recv(len(request), socket.MSG_WAITALL) == request
                elif deed == "mark":
                    counts = [counts[0] + len(request), counts[1] + len(answer)]
                    guard.mark_idle(number, *counts)
                else:
                    written = answer if deed == "write" else answer[:3]
                    accepted.sendall(written)
                    assert client.recv(len(written), socket.MSG_WAITALL) == written
            if gets == b"answered":
                client.sendall(request)  # and nobody reads it
            accepted.close()
            guard.control.close()
            if gets == b"answered":
                assert haproxy.answer(len(request)) == request
            assert client.recv(1000).startswith(gets)
        wait_for(lambda: not guard.is_alive)


def test_a_guard_that_reads_nothing_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(Haproxy()) as haproxy, socket.create_server(("127.0.0.1", 0)) as listener:
        guard = ConnectionGuard(Path(), "127.0.0.1:1")
        guard.process.send_signal(signal.SIGSTOP)
        while not guard.waiting:
            with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
                guard.release(guard.hold(accepted))
        with socket.create_connection(listener.getsockname(), 30) as client, listener.accept()[0] as accepted:
            read = b"a" * 200_000
            guard.return_connection(guard.hold(accepted), read)
            accepted.close()
            guard.process.send_signal(signal.SIGCONT)
            wait_for(guard.flush)
            assert haproxy.answer(len(read)) == read
            assert client.recv(1000) == b"answered"
        guard.control.close()
        wait_for(lambda: not guard.is_alive)


def test_nor_does_one_of_streams() -> None:
    guard = StreamGuard()
    guard.process.wait(30)  # it forks
    os.killpg(guard.process.pid, signal.SIGSTOP)
    with closing(socket.create_server(("127.0.0.1", 0))) as stream:
        transport = SimpleNamespace(get_extra_info=lambda _: stream, get_write_buffer_size=lambda: 0)
        while held := guard.hold(b"end", transport):
            held.release()
    os.killpg(guard.process.pid, signal.SIGCONT)
    wait_for(guard.flush)
    guard.control.close()


@contextmanager
def guard_clients(num_clients: int, read: bytes = b"") -> Iterator[tuple[Haproxy, list[socket.socket]]]:
    """HAProxy, and clients of a replica that has ended, whose guard is a thread. Each has sent `asked`.

    read: the replica has read this instead, and returned the connection
    """
    replica, guards = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    states = memoryview(mmap.mmap(-1, 8 * connection_guard.NUM_COUNTS * num_clients)).cast("Q")
    guard = connection_guard._Guard(guards, states, Path(), "127.0.0.1:1")
    running = threading.Thread(target=guard.run, daemon=True)
    with closing(Haproxy()) as haproxy, socket.create_server(("127.0.0.1", 0)) as listener:
        clients = [socket.create_connection(listener.getsockname(), 30) for _ in range(num_clients)]
        for number, client in enumerate(clients):
            accepted, _ = listener.accept()
            head = connection_guard.HEAD.pack(connection_guard.HOLD, number)
            socket.send_fds(replica, [head], [accepted.fileno()])
            accepted.close()
            if read:
                head = connection_guard.HEAD.pack(connection_guard.RETURN, number)
                replica.sendall(head + read)
                replica.sendall(head)
            else:
                client.sendall(b"asked")
        replica.close()
        running.start()
        yield haproxy, clients
        for client in clients:
            client.close()
    running.join(30)
    guards.close()
    loop = guard._loop
    assert loop is not None
    loop.call_soon_threadsafe(loop.stop)
    wait_for(lambda: not loop.is_running())
    loop.close()


def test_more_clients_than_haproxy_takes_at_once_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_guard, "MAX_RETURNED", 2)
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with guard_clients(20) as (haproxy, clients):
        for _ in clients:
            assert haproxy.answer(5) == b"asked"
        for client in clients:
            with client:
                assert client.recv(1000) == b"answered"


def test_a_client_waits_for_haproxy_within_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_guard, "MAX_RETURNED", 1)
    monkeypatch.setattr(connection_guard, "PLACE_S", 0.1)
    monkeypatch.chdir(tmp_path)
    with guard_clients(3) as (haproxy, clients):
        for _ in range(2):
            (refused, *_), _, _ = select.select(clients, [], [], 30)
            assert refused.recv(1000).startswith(b"HTTP/1.1 503")
            clients.remove(refused)
            refused.close()
        assert haproxy.answer(5) == b"asked"
        assert clients[0].recv(1000) == b"answered"


def test_a_client_that_reads_nothing_keeps_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_guard, "CLIENT_SILENCE_S", 0.1)
    monkeypatch.chdir(tmp_path)
    with guard_clients(1, read=b"asked") as (haproxy, (client,)):
        line, _ = haproxy.socket.accept()
        line.settimeout(30)
        with line, suppress(BrokenPipeError, ConnectionResetError):
            while True:
                line.sendall(bytes(65_536))
        theirs = client.getpeername()

        def is_open() -> bool:
            return any(each.raddr and each.laddr == theirs for each in psutil.Process().net_connections("tcp"))

        wait_for(lambda: not is_open(), what="end of the connection")


def test_a_guard_may_open_all_the_files_that_there_are(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        guard = ConnectionGuard(tmp_path, "127.0.0.1:1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_for(lambda: resource.prlimit(guard.process.pid, resource.RLIMIT_NOFILE) == (hard, hard))
    guard.control.close()
    wait_for(lambda: not guard.is_alive)
