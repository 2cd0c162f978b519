"""HAProxy before a replica that fails while it makes a change: what a client asks of an endpoint's versions."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from threading import Thread

import grpc
import pytest

from serving.fake_replica import FakeReplica
from serving.haproxy_process import UNCHECKED, HaproxyProcess

ANSWER_S = 10.0
BODY, NO_SETTINGS = b"the call", bytes.fromhex("000000040000000000")  # the latter a frame of HTTP/2
SERVICE = "inference.GRPCInferenceService"
CHANGES = [
    "/shoal/v1/rollout",
    "/shoal/v1/%72ollout",
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


def post(proxy: HaproxyProcess, path: str) -> HTTPResponse:
    with closing(HTTPConnection("127.0.0.1", proxy.port, timeout=ANSWER_S)) as connection:
        connection.request("POST", path, b"{}")
        answer = connection.getresponse()
        answer.read()
        return answer


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v2/repository/index", *CHANGES])
def test_only_what_changes_nothing_is_asked_again(proxy: HaproxyProcess, replica: FakeReplica, path: str) -> None:
    """Who died may have made the change before: a rollback that comes twice goes back by two versions."""
    del replica.paths[:]
    answer = post(proxy, f"{path}?/hang-up")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert (len(replica.paths) == 1) == (path in CHANGES)


@pytest.mark.parametrize(
    ("method", "is_change"), [("RepositoryModelLoad", True), ("RepositoryModelUnload", True), ("ModelMetadata", False)]
)
def test_nor_over_grpc(proxy: HaproxyProcess, grpc_replica: AbruptGrpc, method: str, is_change: bool) -> None:
    before = grpc_replica.num_calls
    with grpc.insecure_channel(f"127.0.0.1:{proxy.grpc_port}") as channel:
        call = channel.unary_unary(f"/{SERVICE}/{method}", request_serializer=None, response_deserializer=None)
        with pytest.raises(grpc.RpcError) as caught:
            call(BODY, timeout=ANSWER_S)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert (grpc_replica.num_calls - before == 1) == is_change
