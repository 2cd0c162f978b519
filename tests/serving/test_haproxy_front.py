"""HAProxy with a front of its own before a toy replica: TLS, HTTP/2, IPv6, certificates of clients, trusted proxies."""

import json
import os
import socket
import ssl
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from threading import Event, Thread

import grpc
import pytest

from certificates import Authority
from serving.fake_replica import FakeReplica
from serving.haproxy_process import UNCHECKED, HaproxyProcess
from shoal.client import Client
from shoal.cluster.ingress.front import CertificateFiles, Front
from shoal.cluster.ingress.shared_listener import take_listeners
from shoal.cluster.ingress.tls import CertificateWatch, install_certificate, read_certificate
from shoal.cluster.ports import find_free_port
from shoal.errors import ClusterError, ConfigError
from waiting import wait_for

ANSWER_S = 60.0


@pytest.fixture(scope="module")
def replica() -> Iterator[FakeReplica]:
    fake = FakeReplica()
    yield fake
    fake.close()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextmanager
def haproxy(replica: FakeReplica, front: Front) -> Iterator[HaproxyProcess]:
    with HaproxyProcess(replica.port, find_free_port(), UNCHECKED, front=front) as started:
        yield started


def secure(files: CertificateFiles, **fields: object) -> Front:
    found = read_certificate(files, time.time())
    return replace(Front(pem=found.pem, client_ca=found.client_ca), **fields)  # type: ignore[arg-type]


def context(authority: Authority, client: CertificateFiles | None = None, alpn: str = "http/1.1") -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(authority.ca))
    made.set_alpn_protocols([alpn])
    if client is not None:
        made.load_cert_chain(client.certificate, client.key)
    return made


def echo(connection: HTTPConnection, **headers: str) -> dict[str, str]:
    with_dashes = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request("GET", "/echo", headers=with_dashes)
        response = connection.getresponse()
        assert response.status == 200
        return {name.lower(): value for name, value in json.loads(response.read())["headers"].items()}
    finally:
        connection.close()


def get_serial(port: int, with_context: ssl.SSLContext) -> str:
    with connect(port, with_context) as connection:
        certificate = connection.getpeercert()
        assert certificate is not None
        return str(certificate["serialNumber"])


def connect(port: int, with_context: ssl.SSLContext) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", port), ANSWER_S)
    return with_context.wrap_socket(plain, server_hostname="localhost")


@pytest.mark.parametrize(
    ("host", "addresses"), [("0.0.0.0", ["127.0.0.1"]), ("::", ["127.0.0.1", "::1"]), ("::1", ["::1"])]
)
def test_https_at_addresses_of_both_kinds(
    replica: FakeReplica, authority: Authority, host: str, addresses: list[str]
) -> None:
    trusting = context(authority)
    with haproxy(replica, secure(authority.sign(), host=host)) as started:
        for address in addresses:
            seen = echo(HTTPSConnection(address, started.port, timeout=ANSWER_S, context=trusting))
            assert seen["shoal-from"] == address
        with pytest.raises((OSError, ssl.SSLError)):
            echo(HTTPConnection(addresses[0], started.port, timeout=ANSWER_S))  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["127.0.0.1", "::", "::1"])
def test_a_successor_has_the_same_sockets(replica: FakeReplica, host: str) -> None:
    """Else those of the one before end, with the clients that wait at them."""
    with haproxy(replica, Front(host=host)) as started:
        before = find_sockets(started)
        started.reload()
        assert find_sockets(started) == before


def find_sockets(started: HaproxyProcess) -> set[int]:
    listeners = take_listeners(started.folder, started.port)
    found = {os.fstat(each.fileno()).st_ino for each in listeners}
    for each in listeners:
        each.close()
    return found


def test_the_protocol_is_chosen_by_alpn_and_grpc_is_encrypted(replica: FakeReplica, authority: Authority) -> None:
    with haproxy(replica, secure(authority.sign(), num_threads=2)) as started:
        assert "nbthread 2" in (started.folder / "haproxy.cfg").read_text()
        for offered in ("h2", "http/1.1"):
            with connect(started.port, context(authority, alpn=offered)) as connection:
                assert connection.selected_alpn_protocol() == offered
        credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
        with grpc.secure_channel(f"localhost:{started.grpc_port}", credentials) as channel:
            call = channel.unary_unary("/ray.serve.RayServeAPIService/Healthz")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=ANSWER_S)
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED  # HAProxy's own answer


def test_our_clients_trust_an_authority_and_show_a_certificate(
    replica: FakeReplica, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, own = authority.sign()._replace(client_ca=str(authority.ca)), authority.sign("alice")
    both = tmp_path / "alice-both.pem"
    both.write_text(Path(own.certificate).read_text() + Path(own.key).read_text())
    with haproxy(replica, secure(files)) as started:
        url = f"https://localhost:{started.port}"
        with Client(url, ca=str(authority.ca), certificate=str(both), num_retries=0) as client:
            assert client.live()
        monkeypatch.setenv("SHOAL_CA", str(authority.ca))
        with Client(url, num_retries=0) as client:
            assert not client.live()
        monkeypatch.setenv("SHOAL_CLIENT_CERTIFICATE", str(both))
        with Client(url, num_retries=0) as client:
            assert client.live()
    for field, value in (("ca", tmp_path / "none.pem"), ("certificate", authority.ca)):
        with pytest.raises(ConfigError, match="PEM") as caught:
            Client(url, **{field: str(value)})
        assert (caught.value.field, caught.value.value) == (field, str(value))


def test_a_client_without_a_certificate_is_refused_and_the_subject_of_one_is_passed_on(
    replica: FakeReplica, authority: Authority, tmp_path: Path
) -> None:
    files = authority.sign()._replace(client_ca=str(authority.ca))
    stranger = Authority(tmp_path, "others").sign("mallory")
    with haproxy(replica, secure(files)) as started:

        def ask(client: CertificateFiles | None) -> dict[str, str]:
            trusting = context(authority, client)
            return echo(HTTPSConnection("127.0.0.1", started.port, timeout=ANSWER_S, context=trusting), shoal_from="x")

        assert ask(authority.sign("alice"))["shoal-from"] == "127.0.0.1 CN=alice"
        for refused in (None, stranger):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                ask(refused)


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ("", "127.0.0.1"),
        ("10.0.0.7", "10.0.0.7"),
        ("10.0.0.7, 192.0.2.1", "192.0.2.1"),
        ("10.0.0.7, 192.0.2.1, 127.0.0.9, 127.0.0.8", "192.0.2.1"),
        ("10.0.0.7, unknown, 127.0.0.9", "127.0.0.9"),
        ("2001:db8::7", "2001:db8::7"),
    ],
)
def test_a_trusted_proxy_says_where_a_request_comes_from(
    trusting: HaproxyProcess, plain: HaproxyProcess, given: str, seen: str
) -> None:
    headers = {"x_forwarded_for": given} if given else {}
    headers |= {"x_forwarded_proto": "https", "x_forwarded_host": "elsewhere", "forwarded": "for=x"}
    there = echo(HTTPConnection("127.0.0.1", trusting.port, timeout=ANSWER_S), **headers)
    assert there["shoal-from"] == seen
    assert there["x-forwarded-proto"] == "https"
    there = echo(HTTPConnection("127.0.0.1", plain.port, timeout=ANSWER_S), **headers)
    assert there["shoal-from"] == "127.0.0.1"
    assert not {"x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "forwarded"} & there.keys()


@pytest.fixture(scope="module")
def trusting(replica: FakeReplica) -> Iterator[HaproxyProcess]:
    with haproxy(replica, Front(trusted_proxies=("127.0.0.0/8", "fd00::/8"))) as started:
        yield started


@pytest.fixture(scope="module")
def plain(replica: FakeReplica) -> Iterator[HaproxyProcess]:
    with haproxy(replica, Front(trusted_proxies=("192.0.2.0/24",))) as started:
        yield started


def has_more(before: Counter[str], now: Counter[str]) -> bool:
    return all(now[name] > before[name] + 3 for name in ("200 kept", "200 new"))


def test_certificates_are_replaced_under_load_without_a_failed_request(
    replica: FakeReplica, authority: Authority
) -> None:
    files = authority.sign()._replace(client_ca="")
    trusted = context(authority)
    stop = Event()
    outcomes: Counter[str] = Counter()

    def load(port: int, is_kept: bool) -> None:
        connection = HTTPSConnection("127.0.0.1", port, timeout=ANSWER_S, context=trusted)
        while not stop.is_set():
            connection.request("GET", "/echo")
            response = connection.getresponse()
            response.read()
            outcomes[f"{response.status} {'kept' if is_kept else 'new'}"] += 1
            if not is_kept:
                connection.close()
        connection.close()

    with ExitStack() as stack:
        started = stack.enter_context(haproxy(replica, secure(files)))
        threads = [Thread(target=load, args=(started.port, is_kept)) for is_kept in (True, False)]
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        stack.callback(stop.set)
        watch, serials = CertificateWatch(files, started.files), [get_serial(started.port, trusted)]
        for _ in range(5):
            authority.sign()
            event = watch.poll()
            assert event == ("certificate_replaced", "29 days are left")
            assert watch.poll() is None
            serials.append(get_serial(started.port, trusted))
            before = Counter(outcomes)
            wait_for(partial(has_more, before, outcomes), what="further answers")
    assert len(set(serials)) == len(serials)
    assert outcomes.keys() == {"200 kept", "200 new"}


def test_a_bad_replacement_keeps_the_former_one_in_use_and_on_disk(replica: FakeReplica, authority: Authority) -> None:
    trusted, files = context(authority), authority.sign()
    with haproxy(replica, secure(files)) as started:
        watch, serial = CertificateWatch(files, started.files), get_serial(started.port, trusted)
        authority.sign(begins_in_days=-3, days=1)
        assert watch.poll() is None  # the key may follow
        kind, reason = watch.poll() or ("", "")
        assert kind == "certificate_rejected"
        assert "endpoint.tls.certificate" in reason
        assert "expired" in watch.problem
        assert watch.poll() is None
        assert 28 < watch.days_remaining < 29
        assert get_serial(started.port, trusted) == serial
        garbage = replace(watch.current, pem=b"nothing\n")
        with pytest.raises(ClusterError, match=r"HAProxy does not take front\.pem"):
            install_certificate(garbage, started.files)
        assert (started.files / "front.pem").read_bytes() == watch.current.pem
        assert get_serial(started.port, trusted) == serial
        authority.sign()
        assert (watch.poll() or ("", ""))[0] == "certificate_replaced"
        assert watch.problem == ""


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_of_an_authority_that_was_replaced_is_refused(
    replica: FakeReplica, authority: Authority, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """Also where HAProxy has missed the replacement at first, and where the client goes on with an earlier session."""
    files = authority.sign()._replace(client_ca=str(tmp_path / "clients.pem"))
    Path(files.client_ca).write_bytes(authority.ca.read_bytes())
    others = Authority(tmp_path, "others")
    admitted, refused = (context(authority, each.sign(name)) for each, name in ((others, "bob"), (authority, "alice")))
    refused.minimum_version = refused.maximum_version = version

    def ask(with_context: ssl.SSLContext, session: ssl.SSLSession | None = None) -> ssl.SSLSession | None:
        plain = socket.create_connection(("127.0.0.1", started.port), ANSWER_S)
        with with_context.wrap_socket(plain, server_hostname="localhost", session=session) as connection:
            connection.sendall(b"GET /echo HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 200"
            return connection.session

    with haproxy(replica, secure(files)) as started:
        watch = CertificateWatch(files, started.files)
        admin = started.files / "node" / "a.sock"
        session = ask(refused)
        admin.unlink()
        Path(files.client_ca).write_bytes(others.ca.read_bytes())
        assert (watch.poll() or ("", ""))[0] == "certificate_replaced"
        admin.symlink_to(started.folder / "a.sock")
        assert watch.poll() is None
        ask(admitted)
        for earlier in (None, session):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                ask(refused, earlier)
