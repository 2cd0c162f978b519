"""HAProxy before a replica that fails while it makes a change: what a client asks of an endpoint's versions."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from threading import Thread

import grpc
import pytest

from serving.fake_replica import FakeReplica
from serving.haproxy_process import UNCHECKED, HaproxyProcess
from shoal.cluster import haproxy
from shoal.serve.controller.administration import LOAD_TIMEOUT_S
from shoal.serve.controller.changes import MAX_TIMEOUT_S

ANSWER_S = 10.0
SERVER_S, LONGER_S = 0.2, 0.4
BODY, NO_SETTINGS = b"the call", bytes.fromhex("000000040000000000")  # the latter a frame of HTTP/2
SERVICE = "inference.GRPCInferenceService"
GRPC_CHANGES, GRPC_OTHERS = ["RepositoryModelLoad", "RepositoryModelUnload"], ["RepositoryIndex"]
CHANGES = [
    "/shoal/v1/rollout",
    "/v2/repository/models/m/load",
    "/v2/repository/models/m/unload",
]


class AbruptGrpc:
    """Reads the calls that come to `port`, counts them, and hangs up on each."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_calls = 0
        self._thread = Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(ANSWER_S)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(ANSWER_S)
                connection.sendall(NO_SETTINGS)
                heard = b""
                while BODY not in heard and (more := connection.recv(4096)):
                    heard += more
                self.num_calls += BODY in heard


@pytest.fixture(scope="module")
def replica() -> Iterator[FakeReplica]:
    with closing(FakeReplica()) as fake:
        yield fake


@pytest.fixture(scope="module")
def grpc_replica() -> Iterator[AbruptGrpc]:
    with closing(AbruptGrpc()) as fake:
        yield fake


@pytest.fixture(scope="module")
def proxy(replica: FakeReplica, grpc_replica: AbruptGrpc) -> Iterator[HaproxyProcess]:
    with tempfile.TemporaryDirectory(prefix="x.") as folder:  # pytest's own are too long for unix sockets
        started = HaproxyProcess(Path(folder), replica.port, grpc_replica.port, UNCHECKED)
        yield started
        started.close()


@pytest.fixture(scope="module")
def hurried_proxy(replica: FakeReplica) -> Iterator[HaproxyProcess]:
    """Waits `SERVER_S` for a replica, instead of a minute; over gRPC, every answer takes longer."""

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        time.sleep(LONGER_S)
        return BODY

    handlers = {method: grpc.unary_unary_rpc_method_handler(answer) for method in GRPC_CHANGES + GRPC_OTHERS}
    with ThreadPoolExecutor() as threads, tempfile.TemporaryDirectory(prefix="x.") as folder:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        edits = f"{UNCHECKED}; s/server 60s/server {SERVER_S * 1000:.0f}ms/"
        started = HaproxyProcess(Path(folder), replica.port, port, edits)
        yield started
        started.close()
        server.stop(0).wait(ANSWER_S)


def post(proxy: HaproxyProcess, path: str) -> HTTPResponse:
    with closing(HTTPConnection("127.0.0.1", proxy.port, timeout=ANSWER_S)) as connection:
        connection.request("POST", path)
        answer = connection.getresponse()
        answer.read()
        return answer


def call(proxy: HaproxyProcess, method: str) -> grpc.StatusCode:
    with grpc.insecure_channel(f"127.0.0.1:{proxy.grpc_port}") as channel:
        ask = channel.unary_unary(f"/{SERVICE}/{method}", request_serializer=None, response_deserializer=None)
        try:
            ask(BODY, timeout=ANSWER_S)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v2/repository/index", *CHANGES])
def test_only_what_changes_nothing_is_asked_again(proxy: HaproxyProcess, replica: FakeReplica, path: str) -> None:
    """Who died may have made the change before: a rollback that comes twice goes back by two versions."""
    del replica.paths[:]
    answer = post(proxy, f"{path}?/hang-up")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert (len(replica.paths) == 1) == (path in CHANGES)


@pytest.mark.parametrize("method", GRPC_CHANGES + GRPC_OTHERS)
def test_nor_over_grpc(proxy: HaproxyProcess, grpc_replica: AbruptGrpc, method: str) -> None:
    before = grpc_replica.num_calls
    assert call(proxy, method) == grpc.StatusCode.UNAVAILABLE
    assert (grpc_replica.num_calls - before == 1) == (method in GRPC_CHANGES)


def test_a_change_may_take_longer_than_an_answer(hurried_proxy: HaproxyProcess) -> None:
    """It says by itself when it has taken too long."""
    others = ["/v2/models/m/infer", "/v2/repository/index"]
    statuses = {path: post(hurried_proxy, f"{path}?/slow/{LONGER_S}").status for path in CHANGES + others}
    assert statuses == dict.fromkeys(CHANGES, 200) | dict.fromkeys(others, 504)
    codes = {method: call(hurried_proxy, method) for method in GRPC_CHANGES + GRPC_OTHERS}
    late = dict.fromkeys(GRPC_OTHERS, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert codes == dict.fromkeys(GRPC_CHANGES, grpc.StatusCode.OK) | late
    assert haproxy.CHANGE_TIMEOUT_S > MAX_TIMEOUT_S >= LOAD_TIMEOUT_S
