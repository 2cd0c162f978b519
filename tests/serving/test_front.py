"""A replica that answers clients at HAProxy's own port: what HAProxy does there holds, and no change cuts a request."""

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from serving.front_replica import LAST
from serving.haproxy_process import HaproxyProcess
from serving.raw_requests import ENDS, ODD, PLAIN
from shoal.cluster.ingress.front import Front, is_routed
from shoal.cluster.ingress.shared_listener import ADMIN_SOCKET, MARK_FILE, read_mark
from shoal.cluster.ports import find_free_port
from waiting import wait_for

TESTS = Path(__file__).parents[1]
REQUESTS = PLAIN | ODD
TWO = ("two plain ones", "a plain one, then an odd one", "a plain one, then nonsense", "a plain one, then half")


class Outcome(NamedTuple):
    """What a client gets: the status of each answer, until the connection is closed."""

    statuses: tuple[int, ...]
    is_direct: bool = False


def read_outcome(line: socket.socket, num: int, has_body: bool) -> Outcome:
    statuses: list[int] = []
    is_direct = False
    with line.makefile("rb") as stream, suppress(ConnectionError):
        while len(statuses) < num and (first := stream.readline()):
            headers = http.client.parse_headers(stream)
            if first.split()[1] == b"100":
                continue
            statuses.append(int(first.split()[1]))
            is_direct = "is-direct" in headers
            if has_body:
                stream.read(int(headers.get("content-length", -1)))
    return Outcome(tuple(statuses), is_direct)


class Direct:
    """HAProxy, and a replica's process behind it that answers in its place."""

    def __init__(self, host: str = "127.0.0.1", *application: str) -> None:
        port, self.host = find_free_port(), host
        edits = "s/http-request 10s/http-request 1s/; s/http-keep-alive 5s/http-keep-alive 1s/"
        self.proxy = HaproxyProcess(port, 0, edits, front=Front(host=host))
        words = [sys.executable, "-m", "serving.front_replica", str(port), str(self.proxy.folder), *application]
        self.replica = subprocess.Popen(words, cwd=TESTS, start_new_session=True, stdout=subprocess.PIPE)
        self.wait_for_word("alone")
        wait_for(lambda: is_routed("app", self.proxy.folder / ADMIN_SOCKET), what="HAProxy's checks of the replica")

    def wait_for_word(self, word: str) -> None:
        assert self.replica.stdout is not None
        assert self.replica.stdout.readline() == f"{word}\n".encode()

    def is_direct(self) -> bool | None:
        """None: HAProxy itself answers."""
        with closing(self.connect()) as connection:
            told = ask(connection)[2].get("is_direct")
            return told if isinstance(told, bool) else None

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.proxy.port, timeout=30)

    def send(self, head: str, path: str = "/", method: str = "GET") -> socket.socket:
        """A connection on which a request has been sent."""
        return self.send_bytes(f"{method} {path} HTTP/1.1\r\nhost: a\r\n{head}\r\n".encode())

    def send_bytes(self, data: bytes) -> socket.socket:
        line = socket.create_connection((self.host, self.proxy.port), 30)
        with suppress(ConnectionError):  # it may be answered, and closed, before it is whole
            line.sendall(data)
        return line

    def find_outcome(self, name: str) -> Outcome:
        """Of one of `REQUESTS`."""
        data = REQUESTS[name]
        with self.send_bytes(data) as line:
            if name.startswith(ENDS):
                line.shutdown(socket.SHUT_WR)
            return read_outcome(line, 2 if name in TWO else 1, not data.startswith(b"HEAD"))

    def count_children(self) -> int:
        """Zombies among them."""
        return len(psutil.Process(self.replica.pid).children())

    def end(self, number: signal.Signals) -> None:
        self.replica.send_signal(number)
        self.replica.wait(30)

    def close(self) -> None:
        self.replica.kill()
        self.replica.communicate(timeout=30)
        self.proxy.close()


def ask(connection: http.client.HTTPConnection, path: str = "/v2") -> tuple[int, str | None, dict[str, object]]:
    """The status, the header `connection`, and the body."""
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.headers["connection"], json.loads(response.read())


def read_all(line: socket.socket) -> bytes:
    answer = b""
    with line, suppress(ConnectionResetError):
        while more := line.recv(65_536):
            answer += more
    return answer


@pytest.fixture
def direct(request: pytest.FixtureRequest) -> Iterator[Direct]:
    with closing(Direct(*getattr(request, "param", []))) as direct:
        yield direct


@pytest.mark.parametrize("direct", [["127.0.0.1", "rest"]], indirect=True)
def test_the_only_replica_has_the_status_of_haproxy_for_any_bytes(direct: Direct) -> None:
    def find_all() -> dict[str, Outcome]:
        with ThreadPoolExecutor(16) as pool:
            return dict(zip(REQUESTS, pool.map(direct.find_outcome, REQUESTS), strict=True))

    alone = find_all()
    (direct.proxy.folder / MARK_FILE).unlink()
    wait_for(lambda: not direct.find_outcome("GET").is_direct, what="HAProxy")
    behind = find_all()
    assert not any(each.is_direct for each in behind.values())
    assert [name for name in PLAIN if not alone[name].is_direct] == []
    assert {name: each.statuses for name, each in alone.items()} == {
        name: each.statuses for name, each in behind.items()
    }


def test_the_rules_of_the_ingress_hold_without_it(direct: Direct) -> None:
    connection = direct.connect()
    connection.request("GET", "/a?b", headers={"x-request-id": "1"})
    told = json.loads(connection.getresponse().read())
    assert told == {"path": "/a", "is_direct": True, "from": "127.0.0.1"}
    connection.request("GET", "/a", headers={"shoal-from": "forged"})
    told = json.loads(connection.getresponse().read())
    assert told == {"path": "/a", "is_direct": False, "from": "127.0.0.1"}
    assert ask(connection)[2]["is_direct"], "on a connection of its own again"
    connection.close()
    with direct.send_bytes(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])) as line:
        assert line.recv(9)[3] == 4, "HAProxy's settings of HTTP/2"
    drip = direct.send("connection: close\r\n", path="/drip")
    assert read_all(direct.send("", path="/slow")).startswith(b"HTTP/1.1 504"), "longer than an answer may take"
    assert read_all(drip).endswith(b"}"), "longer, and never silent for so long"


def test_a_killed_ingress_is_replaced_and_no_request_is_cut(direct: Direct) -> None:
    kept = ask_all(direct)
    direct.proxy.process.kill()
    direct.proxy.process.wait(30)
    assert direct.is_direct(), "also while the ingress is dead"
    mark = read_mark(direct.proxy.folder)
    direct.proxy.replace()
    wait_for(lambda: read_mark(direct.proxy.folder) != mark and direct.is_direct(), what="replica at both sockets")
    for each in kept:
        assert ask(each)[2]["is_direct"]
        each.close()
    (direct.proxy.folder / MARK_FILE).unlink()
    wait_for(lambda: direct.is_direct() is False, what="the next ingress")


@pytest.mark.parametrize("direct", [["127.0.0.1"], ["::1"]], indirect=True)
def test_no_request_is_cut_when_the_replica_is_killed(direct: Direct) -> None:
    kept = ask_all(direct)
    slow = direct.send("", path="/slow")
    change = direct.send("content-length: 0\r\n", path="/shoal/v1/rollout", method="POST")
    part, stream = direct.send("", path="/part"), direct.send("", path="/stream")
    assert part.recv(1000)
    assert stream.recv(1000).endswith(b'5\r\n{"pat\r\n')
    direct.wait_for_word("written")  # else the guard takes it for a part that may be incomplete
    wait_for(lambda: direct.count_children() == 1, what="guard that Ray does not kill with the children, nor a zombie")
    direct.end(signal.SIGKILL)
    assert read_all(stream) == LAST
    answer = read_all(slow)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in answer
    changed = read_all(change)
    assert changed.startswith(b"HTTP/1.1 503")
    assert b"retry-after" not in changed, "it may have been made"
    assert read_all(part) == b""
    require_come_again([*kept, direct.connect()])


def test_no_request_is_cut_when_the_replica_stops(direct: Direct) -> None:
    kept = ask_all(direct)
    slow = direct.send("", path="/slow?brief")
    direct.end(signal.SIGTERM)
    answer = read_all(slow)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer
    require_come_again([*kept, direct.connect()])


def ask_all(direct: Direct) -> list[http.client.HTTPConnection]:
    """Connections that are kept, after an answer of the replica's on each."""
    kept = [direct.connect() for _ in range(3)]
    assert all(ask(each)[2]["is_direct"] for each in kept)
    return kept


def require_come_again(connections: list[http.client.HTTPConnection]) -> None:
    """They are HAProxy's, which knows no other replica."""
    for each in connections:
        with closing(each):
            each.request("GET", "/v2")
            response = each.getresponse()
            assert (response.status, response.headers["retry-after"]) == (503, "1")
            response.read()


def test_another_replica_takes_the_connections_back_to_the_ingress(direct: Direct) -> None:
    connection = direct.connect()
    assert ask(connection)[1] is None
    (direct.proxy.folder / "alone.json").unlink()
    wait_for(lambda: direct.is_direct() is False, what="HAProxy")
    status, closes, told = ask(connection)
    assert (status, closes, told["is_direct"]) == (200, "close", False), "it may be for an endpoint that has come"
    assert not ask(connection)[2]["is_direct"]
    connection.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_a_guard_the_clients_are_the_ingresss(direct: Direct, number: signal.Signals) -> None:
    connection, statuses = direct.connect(), set()
    assert ask(connection)[2]["is_direct"]
    (guard,) = psutil.Process(direct.replica.pid).children()
    guard.send_signal(number)

    def is_haproxys() -> bool:  # a stopped guard is missed once its socket is full
        statuses.add(ask(connection)[0])
        return direct.is_direct() is False

    wait_for(is_haproxys, what="HAProxy")
    assert statuses == {200}
    connection.close()
