"""HAProxy, on the configuration that `cluster.haproxy` makes of Serve's, before a replica that fails on request."""

from __future__ import annotations

import hashlib
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import grpc
import psutil
import pytest

from serving.asgi import Reply
from serving.fake_replica import FakeReplica
from serving.haproxy_process import UNCHECKED, HaproxyProcess
from shoal.cluster.ingress import haproxy_config
from shoal.cluster.ingress.serve_environment import BUFFER_BYTES
from shoal.cluster.ports import find_free_port
from waiting import wait_for

# Shorter than an endpoint's, so that the tests need not wait long for what must happen after them.
REQUEST_S = 1.0
SERVER_S = 3.0
CLIENT_S = 1.5
ANSWER_S = 60.0
JSON = "application/json"
SERVICE = "inference.GRPCInferenceService"


class Proxy(HaproxyProcess):
    """With the deadlines of these tests."""

    def __init__(self, replica_port: int, grpc_replica_port: int) -> None:
        edits = (
            f"s/http-request 10s/http-request {REQUEST_S * 1000:.0f}ms/; s/server 60s/server {SERVER_S * 1000:.0f}ms/"
            f"; s/client 30s/client {CLIENT_S * 1000:.0f}ms/"
        )
        super().__init__(replica_port, grpc_replica_port, edits)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), ANSWER_S)

    def ask(self, request: bytes) -> Reply:
        with self.connect() as connection:
            connection.sendall(request)
            return read_answer(connection)

    def get(self, path: str, *headers: str) -> Reply:
        return self.ask("\r\n".join([f"GET {path} HTTP/1.1", "host: x", *headers, "", ""]).encode())


def read_answer(connection: socket.socket) -> Reply:
    response = HTTPResponse(connection)
    response.begin()
    length = int(response.headers.get("content-length", 0))
    return Reply(
        response.status, {name.lower(): each for name, each in response.headers.items()}, response.read(length)
    )


def post(body_bytes: int, *headers: str) -> bytes:
    return "\r\n".join(["POST /echo HTTP/1.1", "host: x", f"content-length: {body_bytes}", *headers, "", ""]).encode()


@pytest.fixture(scope="module")
def replica() -> Iterator[FakeReplica]:
    fake = FakeReplica()
    yield fake
    fake.close()


@pytest.fixture(scope="module")
def proxy(replica: FakeReplica) -> Iterator[Proxy]:
    with Proxy(replica.port, grpc_replica_port=find_free_port()) as started:
        yield started


@pytest.fixture(scope="module")
def early_proxy() -> Iterator[Proxy]:
    """Before Serve has an application, or when it has none any more."""
    with Proxy(replica_port=0, grpc_replica_port=0) as started:
        yield started


@pytest.fixture(scope="module")
def lonely_proxy() -> Iterator[Proxy]:
    """Before a replica that is not there, and before no application for gRPC."""
    with Proxy(find_free_port(), grpc_replica_port=0) as started:
        yield started


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"GET /\x01 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nbad header: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nh: " + b"y" * 2 * BUFFER_BYTES + b"\r\n\r\n",
        b"GET /" + b"y" * 2 * BUFFER_BYTES + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: no-such\r\n\r\n",
    ],
)
def test_what_is_not_a_request(proxy: Proxy, replica: FakeReplica, request_bytes: bytes) -> None:
    """HAProxy 2.8 says so in HTML: no setting reaches its answer to a head that it cannot read (its issue 3032)."""
    del replica.paths[:]
    answer = proxy.ask(request_bytes)
    assert answer.status in (400, 422, 501)
    assert answer.status != 400 or b"Bad request" in answer.content
    assert replica.paths == []


@pytest.mark.parametrize(
    "headers",
    [["h: " + "y" * 30 * 1024], [f"h{i}: y" for i in range(2000)], ["h: "] * 2000],
    ids=["long", "many", "empty"],
)
def test_headers_that_the_endpoint_would_refuse_reach_it(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, headers: list[str]
) -> None:
    """So that it can say 431: several times what it takes fits into the buffer, however many they are."""
    monkeypatch.setattr("http.client._MAXHEADERS", 10_000)
    assert proxy.get("/echo", *headers).status == 200


@pytest.mark.parametrize("beginning", [b"G", post(100) + b"x" * 99, post(10, "expect: 100-continue")])
def test_a_request_that_is_not_there_in_time_is_cut_off(proxy: Proxy, replica: FakeReplica, beginning: bytes) -> None:
    del replica.paths[:]
    with proxy.connect() as connection:
        connection.sendall(beginning)
        answer = read_answer(connection)
        if answer.status == 100:
            answer = read_answer(connection)
        assert (answer.status, answer.headers.get("connection")) == (408, "close")
        if b"\r\n\r\n" in beginning:  # a late head is answered with HTML, as one that cannot be read
            assert "not there after" in answer.error
        assert connection.recv(1) == b""
    assert replica.paths == []


def test_one_byte_after_another_does_not_help(proxy: Proxy) -> None:
    with proxy.connect() as connection:
        connection.settimeout(REQUEST_S / 8)
        answer = b""
        for byte in post(1000):
            try:
                connection.sendall(bytes([byte]))
                answer = connection.recv(64)
            except TimeoutError:
                continue
            except ConnectionError:
                break
            if answer:
                break
        assert answer.startswith(b"HTTP/1.1 408")


def test_a_large_body_that_stops_coming_is_cut_off(proxy: Proxy) -> None:
    """By HAProxy at last; the endpoint notices sooner, also one that trickles: see test_slow_clients."""
    with proxy.connect() as connection:
        connection.sendall(post(10 * BUFFER_BYTES) + b"x" * 2 * BUFFER_BYTES)
        answer = read_answer(connection)
        assert answer.status == 400
        assert "whole" in answer.error


def test_an_honest_large_body_arrives_whole(proxy: Proxy) -> None:
    body = bytes(range(256)) * 40_000
    seen = proxy.ask(post(len(body)) + body).body
    assert (seen["length"], seen["sha256"]) == (len(body), hashlib.sha256(body).hexdigest())


def test_a_body_in_chunks_and_one_that_asks_first_arrive(proxy: Proxy) -> None:
    chunked = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    assert proxy.ask(chunked).body["sha256"] == hashlib.sha256(b"abcde").hexdigest()
    with proxy.connect() as connection:
        connection.sendall(post(3, "expect: 100-continue"))
        assert connection.recv(1000).startswith(b"HTTP/1.1 100")
        connection.sendall(b"abc")
        assert read_answer(connection).body["length"] == 3


def test_a_computation_may_take_longer_than_a_client_may(proxy: Proxy) -> None:
    assert proxy.get(f"/slow/{1.5 * CLIENT_S}").status == 200


@pytest.mark.parametrize(("path", "status"), [("/silent", 504), ("/hang-up", 503), ("/nonsense", 503)])
def test_a_replica_that_fails_becomes_the_protocols_error(proxy: Proxy, path: str, status: int) -> None:
    answer = proxy.get(path)
    assert answer.status == status
    assert answer.error
    assert answer.headers.get("retry-after") == ("1" if status == 503 else None)
    wait_for(lambda: proxy.get("/echo").status == 200, what="replica taken back")


@pytest.mark.parametrize("which", ["lonely_proxy", "early_proxy"])
def test_no_replica_is_a_503_that_says_when_to_come_again(request: pytest.FixtureRequest, which: str) -> None:
    started: Proxy = request.getfixturevalue(which)
    for path in ("/v2/health/live", "/v2/models/m/infer", "/"):
        answer = started.get(path)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "no replica" in answer.error


@pytest.mark.parametrize("status", [400, 404, 408, 429, 499, 500, 503])
def test_serves_own_text_becomes_the_protocols_error(proxy: Proxy, status: int) -> None:
    """With the same status, where there is one. 404 means that Serve has no application: not yet, or no more."""
    answer = proxy.get(f"/status/{status}?text/plain")
    assert answer.status == {499: 500, 404: 503}.get(status, status)
    assert "the replica says" not in answer.error
    assert answer.headers.get("retry-after") == ("1" if answer.status in (429, 503) else None)


@pytest.mark.parametrize("status", [200, 404, 422, 431, 503])
def test_the_endpoints_own_answers_pass(proxy: Proxy, status: int) -> None:
    answer = proxy.get(f"/status/{status}?{JSON}")
    assert (answer.status, answer.error) == (status, "the replica says")


@pytest.mark.parametrize(("status", "ends"), [(408, True), (413, True), (422, False)])
def test_clients_are_told_when_their_connection_ends_with_the_answer(proxy: Proxy, status: int, ends: bool) -> None:
    """The endpoint has not read the whole body then, and who sent the next request would find nobody."""
    with proxy.connect() as connection:
        for _ in range(1 if ends else 2):
            connection.sendall(f"GET /status/{status}?{JSON} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            answer = read_answer(connection)
            assert (answer.status, answer.headers.get("connection")) == (status, "close" if ends else None)
        if ends:
            assert connection.recv(1) == b""


@pytest.mark.parametrize(
    "path", ["/-/healthz", "/-/routes", "/-/HEALTHZ", "/%2d/healthz", "/%2D%2Froutes", "/-/healthz?x=y", "/-%2froutes"]
)
def test_serves_own_paths_are_closed(proxy: Proxy, replica: FakeReplica, path: str) -> None:
    del replica.paths[:]
    answer = proxy.get(path)
    assert answer.status == 404
    assert answer.error
    assert replica.paths == []


def test_headers_that_steer_serve_do_not_pass(proxy: Proxy) -> None:
    steering = [
        "x-request-timeout-seconds",
        "x-session-id",
        "serve_multiplexed_model_id",
        "x-serve-router-x",
        "upgrade",
    ]
    given = ["connection: upgrade", *(f"{name}: y" for name in steering)]
    seen = proxy.get("/echo", *given, "x-request-disconnect-disabled: ?0", "x-request-id: a b\xe9").body
    headers = {name.lower(): value for name, value in seen["headers"].items()}
    assert not headers.keys() & {*steering, "x-request-id"}
    assert headers["x-request-disconnect-disabled"] == "?1"
    seen = proxy.get("/echo", "x-request-id: a-1").body
    assert "a-1" in seen["headers"].values()


def test_the_endpoint_hears_where_a_request_comes_from(proxy: Proxy) -> None:
    """Proxies that are named as trusted: see test_haproxy_front."""
    there = proxy.get("/echo", "shoal-from: elsewhere", "x-forwarded-for: 10.0.0.7").body["headers"]
    assert there["shoal-from"] == "127.0.0.1"
    assert "x-forwarded-for" not in there


def test_nothing_listens_but_the_front(proxy: Proxy) -> None:
    listening = [each for each in psutil.net_connections("tcp") if each.pid == proxy.process.pid]
    ports = {(each.laddr.ip, each.laddr.port) for each in listening if each.status == psutil.CONN_LISTEN}
    assert ports == {("127.0.0.1", proxy.port), ("127.0.0.1", proxy.grpc_port)}
    mode = (proxy.folder / "a.sock").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


@pytest.mark.parametrize(
    ("method", "code"),
    [
        ("/inference.GRPCInferenceService/ServerLive", grpc.StatusCode.UNAVAILABLE),
        ("/ray.serve.RayServeAPIService/ListApplications", grpc.StatusCode.UNIMPLEMENTED),
        ("/ray.serve.RayServeAPIService/Healthz", grpc.StatusCode.UNIMPLEMENTED),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", grpc.StatusCode.UNIMPLEMENTED),
    ],
)
@pytest.mark.parametrize("which", ["proxy", "lonely_proxy", "early_proxy"])
def test_over_grpc_too(request: pytest.FixtureRequest, which: str, method: str, code: grpc.StatusCode) -> None:
    started: Proxy = request.getfixturevalue(which)
    with grpc.insecure_channel(f"127.0.0.1:{started.grpc_port}") as channel:
        call = channel.unary_unary(method, request_serializer=None, response_deserializer=None)
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=ANSWER_S)
    assert caught.value.code() == code
    assert caught.value.details() in haproxy_config.ERRORS.values()


def test_a_replica_that_is_busy_is_not_taken_for_dead() -> None:
    """Its health checks wait behind what it is asked: for longer than HAProxy waits between two of them."""
    with ExitStack() as stack:
        busy = FakeReplica(check_s=0.5)
        stack.callback(busy.close)
        started = HaproxyProcess(busy.port, 0, "s/ inter 1s/ inter 50ms/; s/ fall 2/ fall 1/")
        stack.callback(started.close)
        wait_for(lambda: busy.num_checks >= 3, ANSWER_S, "health checks")
        with closing(HTTPConnection("127.0.0.1", started.port, timeout=ANSWER_S)) as client:
            client.request("GET", "/echo")
            assert client.getresponse().status == 200


def test_connections_to_a_replica_are_kept_however_many_clients_there_are(replica: FakeReplica) -> None:
    """HAProxy closes them when a quarter of its descriptors is in use: a connection for each request under overload."""
    with ExitStack() as stack:
        edits = f"{UNCHECKED}; s/maxconn .*/maxconn 100/"
        small = HaproxyProcess(replica.port, grpc_replica_port=0, edits=edits)
        stack.callback(small.close)
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", small.port), ANSWER_S)) for _ in range(90)
        ]
        before = replica.num_connections
        for client in clients * 3:
            client.sendall(b"GET /echo HTTP/1.1\r\nhost: x\r\n\r\n")
            assert read_answer(client).status == 200
        assert replica.num_connections - before < len(clients) / 3


def test_a_temporary_folder_with_a_long_name_is_no_hindrance(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of this machine's user ($TMPDIR), whose path no unix socket could have."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    with (
        HaproxyProcess(replica.port, 0, UNCHECKED) as proxy,
        closing(HTTPConnection("127.0.0.1", proxy.port, timeout=ANSWER_S)) as client,
    ):
        client.request("GET", "/echo")
        assert client.getresponse().status == 200
