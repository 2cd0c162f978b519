"""HAProxy before a replica that fails while it makes a change: what a client asks of an endpoint's versions."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse

import grpc
import pytest

from serving.fake_replica import FakeReplica
from serving.haproxy_process import UNCHECKED, HaproxyProcess
from shoal.cluster.ingress.backup_listener import GRPC_REFUSED
from shoal.cluster.ingress.serve_environment import hold_while_asleep, write_sleep_mark
from shoal.cluster.ingress.time_limits import CHANGE_S
from shoal.cluster.ports import find_free_port
from shoal.serve.controller.admin_api import LOAD_TIMEOUT_S
from shoal.serve.controller.change_request import MAX_TIMEOUT_S
from shoal.serve.spec.api_key import hash_bytes
from waiting import wait_for

ANSWER_S = 60.0
INFER = "/v2/models/m/infer"
SERVER_S, LONGER_S = 0.2, 0.4
SERVICE = "inference.GRPCInferenceService"
GRPC_CHANGES, GRPC_OTHERS = ["RepositoryModelLoad", "RepositoryModelUnload"], ["RepositoryIndex"]
CHANGES = [
    "/shoal/v1/rollout",
    "/v2/repository/models/m/load",
    "/v2/repository/models/m/unload",
    "/second/v2/repository/models/m/load",
]


@pytest.fixture(scope="module")
def replica() -> Iterator[FakeReplica]:
    with closing(FakeReplica()) as fake:
        yield fake


@pytest.fixture(scope="module")
def proxy(replica: FakeReplica) -> Iterator[HaproxyProcess]:
    with HaproxyProcess(replica.port, find_free_port(), UNCHECKED) as started:
        yield started


@pytest.fixture(scope="module")
def hurried_proxy(replica: FakeReplica) -> Iterator[HaproxyProcess]:
    """Waits `SERVER_S` for a replica, instead of a minute."""
    edits = f"{UNCHECKED}; s/server 60s/server {SERVER_S * 1000:.0f}ms/"
    with HaproxyProcess(replica.port, find_free_port(), edits) as started:
        yield started


def post(proxy: HaproxyProcess, path: str, **headers: str) -> HTTPResponse:
    """`shoal_deadline_ms="5"` is a header."""
    with closing(HTTPConnection("127.0.0.1", proxy.port, timeout=ANSWER_S)) as connection:
        connection.request("POST", path, headers={name.replace("_", "-"): each for name, each in headers.items()})
        answer = connection.getresponse()
        answer.read()
        return answer


def get(proxy: HaproxyProcess, path: str) -> bytes:
    with closing(HTTPConnection("127.0.0.1", proxy.port, timeout=ANSWER_S)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read()


def call(proxy: HaproxyProcess, method: str) -> grpc.StatusCode:
    return fail(proxy, method).code()


def fail(proxy: HaproxyProcess, method: str) -> grpc.RpcError:
    with grpc.insecure_channel(f"127.0.0.1:{proxy.grpc_port}") as channel:
        ask = channel.unary_unary(f"/{SERVICE}/{method}", request_serializer=None, response_deserializer=None)
        with pytest.raises(grpc.RpcError) as caught:
            ask(b"", timeout=ANSWER_S)
    return caught.value


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v2/repository/index", *CHANGES])
def test_only_what_changes_nothing_is_asked_again(proxy: HaproxyProcess, replica: FakeReplica, path: str) -> None:
    """Who died may have made the change before: a rollback that comes twice goes back by two versions."""
    del replica.paths[:]
    answer = post(proxy, f"{path}?/hang-up")
    assert (answer.status, answer.headers["retry-after"]) == (503, None if path in CHANGES else "1")
    assert (len(replica.paths) == 1) == (path in CHANGES)


@pytest.mark.parametrize("method", GRPC_CHANGES + GRPC_OTHERS)
def test_nor_over_grpc(proxy: HaproxyProcess, replica: FakeReplica, method: str) -> None:
    del replica.paths[:]
    assert call(proxy, f"{method}?/hang-up") == grpc.StatusCode.UNAVAILABLE
    assert (len(replica.paths) == 1) == (method in GRPC_CHANGES)


def test_a_change_may_take_longer_than_an_answer(hurried_proxy: HaproxyProcess) -> None:
    """It says by itself when it has taken too long."""
    others = ["/v2/models/m/infer", "/v2/repository/index"]
    statuses = {path: post(hurried_proxy, f"{path}?/slow/{LONGER_S}").status for path in CHANGES + others}
    assert statuses == dict.fromkeys(CHANGES, 200) | dict.fromkeys(others, 504)
    codes = {method: call(hurried_proxy, f"{method}?/slow/{LONGER_S}") for method in GRPC_CHANGES + GRPC_OTHERS}
    late = dict.fromkeys(GRPC_OTHERS, grpc.StatusCode.DEADLINE_EXCEEDED)
    answered = dict.fromkeys(GRPC_CHANGES, grpc.StatusCode.UNAVAILABLE)  # it was no answer of gRPC
    assert codes == answered | late
    assert CHANGE_S > MAX_TIMEOUT_S >= LOAD_TIMEOUT_S


@pytest.mark.parametrize("size_bytes", [1_000, 1_000_000])
@pytest.mark.parametrize("path", ["/v2/models/m/infer", CHANGES[0]])
def test_what_fails_on_a_kept_connection_has_a_status(proxy: HaproxyProcess, path: str, size_bytes: int) -> None:
    """HAProxy by itself closes it, for the client to try again."""
    with closing(HTTPConnection("127.0.0.1", proxy.port, timeout=ANSWER_S)) as connection:
        for failing in (False, True, True):
            connection.request("POST", f"{path}?/hang-up" if failing else "/echo", bytes(size_bytes))
            answer = connection.getresponse()
            answer.read()
            expected = (503, None if path in CHANGES else "1") if failing else (200, None)
            assert (answer.status, answer.headers["retry-after"]) == expected


def sleeping(replica: FakeReplica, edits: str = "", keys: Sequence[str] = ()) -> HaproxyProcess:
    """HAProxy of an endpoint that sleeps: requests go to Serve's own proxy, whose place the fake one takes here."""

    def prepare(environment: dict[str, str]) -> None:
        write_sleep_mark(environment, "app", time.time() + 3600, 0, 0)  # no effect on one that may not sleep yet
        hold_while_asleep(environment, "app", is_on=True, keys=keys)

    return HaproxyProcess(0, 0, UNCHECKED + edits, fallback_port=replica.port, prepare=prepare)


def test_asleep_a_request_is_held_for_a_time(replica: FakeReplica) -> None:
    with sleeping(replica, f"; s/server 60s/server {SERVER_S * 1000:.0f}ms/") as proxy:
        assert post(proxy, INFER).status == 200
        assert post(proxy, "/shoal/v1/rollout").status == 503
        answer = post(proxy, f"{INFER}?/silent")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        for method in ("RepositoryModelUnload", "ModelInfer", "ModelStreamInfer"):
            error = fail(proxy, method)
            assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, GRPC_REFUSED)
        got = get(proxy, "/shoal/v1/status"), get(proxy, "/app/v2/health/ready"), get(proxy, "/metrics")
        assert got == (b'{"endpoint":"app","ready":true,"asleep":true}', b'{"ready":true}', b"")


def test_asleep_with_a_spent_budget_a_request_learns_when_to_come_again(replica: FakeReplica) -> None:
    with sleeping(replica) as proxy:
        assert post(proxy, INFER).status == 200
        write_sleep_mark(proxy.environment, "app", time.time() + 3600, 0, 0)
        answer = post(proxy, INFER)
        assert answer.status == 503
        assert 3000 < int(answer.headers["retry-after"]) <= 3601
        assert get(proxy, "/v2/health/ready") == b'{"ready":true}'
        write_sleep_mark(proxy.environment, "app", time.time() - 1, 0, 0)
        assert post(proxy, INFER).status == 200


def test_asleep_no_more_than_some_are_held(replica: FakeReplica) -> None:
    edits = f"; s/be_conn gt 512/be_conn gt 1/; s/server 60s/server {SERVER_S * 1000:.0f}ms/"
    with sleeping(replica, edits) as proxy, closing(HTTPConnection("127.0.0.1", proxy.port, timeout=ANSWER_S)) as held:
        held.request("POST", f"{INFER}?/silent")
        wait_for(lambda: post(proxy, INFER).status == 503)
        answer = post(proxy, INFER)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        held.getresponse().read()
        assert post(proxy, INFER).status == 200


def test_asleep_what_a_replica_would_refuse_wakes_none(replica: FakeReplica) -> None:
    with sleeping(replica, keys=[hash_bytes(each).hex() for each in (b"one", b"another")]) as proxy:
        del replica.paths[:]
        for shown in ({}, *({"authorization": each} for each in ("Bearer two", "Basic one", "one", "Bearer"))):
            assert post(proxy, INFER, **shown).status == 401
        for path in ("/", "/favicon.ico", "/other/v2/models/m/infer", "/v2/models/m/nonsense", "/v2/models//infer"):
            assert post(proxy, path, authorization="Bearer one").status == 404
        assert not replica.paths
        for key, path in (("Bearer one", INFER), ("bearer another", f"/app{INFER}"), ("Bearer one", "/v2/models/m")):
            assert post(proxy, path, authorization=key).status == 200
        for path in ("/v1/chat/completions", "/app/v1/messages"):
            assert post(proxy, path, x_api_key="two").status == 401
            assert post(proxy, path, x_api_key="one").status == 200
            assert post(proxy, f"{path}/nonsense", x_api_key="one").status == 404
        assert get(proxy, "/v2/health/ready") == b'{"ready":true}'


def test_asleep_a_deadline_that_no_start_can_meet_is_refused_at_once_and_wakes(replica: FakeReplica) -> None:
    with sleeping(replica) as proxy:

        def ask(path: str, deadline_ms: float) -> tuple[int, str | None, str | None]:
            answer = post(proxy, path, shoal_deadline_ms=f"{deadline_ms:g}")
            return answer.status, answer.headers["retry-after"], answer.headers["shoal-late"]

        late = (504, "1", None)
        assert ask(f"{INFER}?/silent", 300) == late  # held until then: how long a start takes is not known
        write_sleep_mark(proxy.environment, "app", 0, 3600, 0)
        del replica.paths[:]
        assert ask(f"{INFER}?/silent", 1.8e6) == late
        assert len(replica.paths) == 1
        assert ask(f"{INFER}?/slow/{LONGER_S}", 7.2e6)[0] == 200
        write_sleep_mark(proxy.environment, "app", 0, 3600, time.time() - 3000)  # a start that is nearly done
        assert ask(f"{INFER}?/slow/{LONGER_S}", 1.8e6)[0] == 200
