"""A replica that answers clients at HAProxy's own port: what HAProxy does there holds, and no change cuts a request."""

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from serving.front_replica import LAST
from serving.haproxy_process import HaproxyProcess
from shoal.cluster.ports import find_free_port
from waiting import wait_for

TESTS = Path(__file__).parents[1]


class Direct:
    """HAProxy, and a replica's process behind it that answers in its place."""

    def __init__(self, head_s: float = 60.0) -> None:
        port = find_free_port()
        self.proxy = HaproxyProcess(port, 0)
        words = [sys.executable, "-m", "serving.front_replica", str(port), str(self.proxy.folder), str(head_s)]
        self.replica = subprocess.Popen(words, cwd=TESTS, start_new_session=True, stdout=subprocess.PIPE)
        self.wait_for_word("alone")

    def wait_for_word(self, word: str) -> None:
        assert self.replica.stdout is not None
        assert self.replica.stdout.readline() == f"{word}\n".encode()

    def is_direct(self) -> bool | None:
        """None: HAProxy itself answers."""
        with closing(self.connect()) as connection:
            told = ask(connection)[2].get("is_direct")
            return told if isinstance(told, bool) else None

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.proxy.port, timeout=30)

    def send(self, head: str, path: str = "/", method: str = "GET") -> socket.socket:
        """A connection on which a request has been sent."""
        line = socket.create_connection(("127.0.0.1", self.proxy.port), 30)
        line.sendall(f"{method} {path} HTTP/1.1\r\nhost: a\r\n{head}\r\n".encode())
        return line

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


@pytest.mark.parametrize("direct", [[1.0]], indirect=True)
def test_the_rules_of_the_ingress_hold_without_it(direct: Direct) -> None:
    late = direct.send("x: y")
    connection = direct.connect()
    connection.request("GET", "/a?b", headers={"shoal-from": "forged", "x-request-id": "1"})
    told = json.loads(connection.getresponse().read())
    assert told == {"path": "/a", "is_direct": True, "from": "127.0.0.1"}
    assert ask(connection, "/a%20b")[2]["path"] == "/a b"
    assert ask(connection, "/-/healthz")[2]["path"] == "/closed", "a path of Serve's own"
    with direct.send("expect: 100-continue\r\ncontent-length: 1\r\n", method="POST") as line:
        assert line.recv(1000).startswith(b"HTTP/1.1 100")
        line.sendall(b"x")
        assert line.recv(1000).startswith(b"HTTP/1.1 200")
    upgraded = read_all(direct.send("connection: upgrade\r\nupgrade: websocket\r\n"))
    assert upgraded.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in upgraded
    with direct.send("") as line:
        assert line.recv(1000).startswith(b"HTTP/1.1 200")
        line.sendall(b"nonsense\r\n\r\n")
        assert line.recv(1000).startswith(b"HTTP/1.1 400")
    connection.close()
    endless = direct.send("x: " + "y" * 40_000)
    assert read_all(endless).startswith(b"HTTP/1.1 400")
    with socket.create_connection(("127.0.0.1", direct.proxy.port), 30) as line:
        line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        assert line.recv(9)[3] == 4, "HAProxy's settings of HTTP/2"
    drip = direct.send("connection: close\r\n", path="/drip")
    assert read_all(direct.send("", path="/slow")).startswith(b"HTTP/1.1 504"), "longer than an answer may take"
    assert read_all(drip).endswith(b"}"), "longer, and never silent for so long"
    assert read_all(late).startswith(b"HTTP/1.1 408")
    direct.proxy.process.kill()
    direct.proxy.process.wait(30)
    assert direct.is_direct(), "also while the ingress is dead"


def test_no_request_is_cut_when_the_replica_is_killed(direct: Direct) -> None:
    kept = ask_all(direct)
    half, slow = direct.send("x: y"), direct.send("", path="/slow")
    change = direct.send("content-length: 0\r\n", path="/shoal/v1/rollout", method="POST")
    part, stream = direct.send("", path="/part"), direct.send("", path="/stream")
    assert part.recv(1000)
    assert stream.recv(1000).endswith(b'5\r\n{"pat\r\n')
    direct.wait_for_word("written")  # else the guard takes it for a part that may be incomplete
    wait_for(lambda: direct.count_children() == 1, what="guard that Ray does not kill with the children, nor a zombie")
    direct.end(signal.SIGKILL)
    assert read_all(stream) == LAST
    for line in (half, slow):
        answer = read_all(line)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in answer
    changed = read_all(change)
    assert changed.startswith(b"HTTP/1.1 503")
    assert b"retry-after" not in changed, "it may have been made"
    assert read_all(part) == b""
    require_come_again([*kept, direct.connect()])


def test_no_request_is_cut_when_the_replica_stops(direct: Direct) -> None:
    kept = ask_all(direct)
    half, slow = direct.send("x: y"), direct.send("", path="/slow?brief")
    direct.end(signal.SIGTERM)
    answer = read_all(slow)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer
    half.sendall(b"\r\n\r\n")
    assert read_all(half).startswith(b"HTTP/1.1 503")
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


def test_a_killed_guard_leaves_the_clients_to_the_ingress(direct: Direct) -> None:
    connection = direct.connect()
    assert ask(connection)[2]["is_direct"]
    (guard,) = psutil.Process(direct.replica.pid).children()
    guard.kill()
    wait_for(lambda: direct.is_direct() is False, what="HAProxy")
    assert ask(connection)[:2] == (200, "close")
    connection.close()
