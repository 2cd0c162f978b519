"""The rules of trying again, without a socket, a clock or a wait; proxies and certificates of the environment."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from pathlib import Path

import pytest

from shoal.client import AsyncClient, Client
from shoal.client.address import find_proxy
from shoal.client.retry import (
    EndpointRequest,
    Reply,
    RetryPolicy,
    request_with_retries,
)
from shoal.client.transport import AsyncTransport, BlockingTransport
from shoal.errors import Closed, ConfigError, ConnectionLost, InferenceError, RequestLost

REQUEST = EndpointRequest("POST", "/v2/models/m/infer", body=b"{}")
FULL = Reply(429, {"retry-after": "2"}, json.dumps({"error": "the queue is full"}).encode())
DONE = Reply(200, {}, b"{}")


class Talk:
    """A transport without a socket: a clock that a wait, and `send_s` for each attempt, moves on."""

    def __init__(self, policy: RetryPolicy, send_s: float = 0.01, late_s: float = 0.0) -> None:
        """late_s: how much longer each wait takes than it should"""
        self.now_s = 100.0
        self._policy = policy
        self._send_s = send_s
        self._late_s = late_s
        self.sent: list[tuple[EndpointRequest, float]] = []
        self.waits: list[float] = []

    async def send(self, request: EndpointRequest, timeout_s: float) -> Reply:
        self.sent.append((request, timeout_s))
        self.now_s += self._send_s
        outcome = next(self._script)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now_s += seconds + self._late_s

    def answer(self, *outcomes: Reply | Exception) -> Reply:
        """What a call returns or raises when its attempts end so, one after the other."""
        self._script = iter(outcomes)
        call = request_with_retries(REQUEST, self._policy, self, clock=lambda: self.now_s, jitter=lambda: 0.0)
        return asyncio.run(call)


REFUSED = ConnectionLost("the endpoint cannot be reached: refused")
LOST = RequestLost("the connection broke before the answer was complete: reset")


@pytest.mark.parametrize(
    ("policy", "outcomes", "waits"),
    [
        (RetryPolicy(5.0), [DONE], []),
        (RetryPolicy(5.0), [REFUSED, REFUSED, REFUSED, DONE], [0.05, 0.1, 0.2]),
        (RetryPolicy(5.0), [FULL, DONE], [2.0]),
        (RetryPolicy(5.0, retry_lost=True), [LOST, DONE], [0.05]),
        (RetryPolicy(5.0, retry_lost=True, is_change=True), [REFUSED, DONE], [0.05]),
    ],
)
def test_what_may_be_sent_again_is(policy: RetryPolicy, outcomes: list[Reply | Exception], waits: list[float]) -> None:
    talk = Talk(policy)
    assert talk.answer(*outcomes) is DONE
    assert (len(talk.sent), talk.waits) == (len(outcomes), waits)


CHANGE = RetryPolicy(5.0, retry_lost=True, is_change=True)


@pytest.mark.parametrize(
    ("policy", "outcomes", "message"),
    [
        (RetryPolicy(5.0, num_retries=1), [REFUSED, REFUSED], "cannot be reached: refused"),
        (RetryPolicy(1.5), [FULL], "the queue is full"),  # what would be too late is not waited for
        *(
            (RetryPolicy(5.0), [Reply(each, {"retry-after": "0"}, b'{"error": "no"}')], "no")
            for each in (400, 404, 500, 504)
        ),
        (RetryPolicy(5.0), [Reply(503, {}, b'{"error": "closing"}')], "closing"),
        (RetryPolicy(5.0), [LOST], "before the answer was complete"),
        # Whatever the answer says of a change: who gave it need not know what became of it.
        (CHANGE, [FULL], "full"),
        (CHANGE, [Reply(503, {"retry-after": "1"}, b"{}")], "HTTP status|{}"),
        (CHANGE, [LOST], "before the answer was complete"),
        (RetryPolicy(0.5), [TimeoutError()], r"no answer within 0.5 s"),
        (RetryPolicy(1.0), [Reply(502, {}, b"<h1>Bad Gateway</h1>")], "Bad Gateway"),  # not the protocol's words
        (RetryPolicy(1.0), [Reply(500, {}, b"")], "HTTP status 500"),
    ],
)
def test_what_ends_a_call(policy: RetryPolicy, outcomes: list[Reply | Exception], message: str) -> None:
    talk = Talk(policy)
    with pytest.raises((InferenceError, ConnectionLost), match=message) as caught:
        talk.answer(*outcomes)
    assert len(talk.sent) == len(outcomes)
    if isinstance(caught.value, InferenceError):
        last = outcomes[-1]
        assert caught.value.status == (last.status if isinstance(last, Reply) else 504)
        assert caught.value.retry_after_s == {429: 2.0, 503: None if policy is not CHANGE else 1.0}.get(
            caught.value.status
        )


def test_the_time_of_the_caller_is_for_all_attempts_together() -> None:
    talk = Talk(RetryPolicy(1.0), send_s=0.4)
    with pytest.raises(ConnectionLost):
        talk.answer(REFUSED, REFUSED, REFUSED)
    assert [round(timeout_s, 2) for _, timeout_s in talk.sent] == [1.0, 0.55, 0.05]


def test_the_time_of_the_caller_may_have_begun_before() -> None:
    talk = Talk(RetryPolicy(1.0, sends_deadline=True, end_s=100.6))
    assert talk.answer(REFUSED, DONE) is DONE
    assert [request.headers["shoal-deadline-ms"] for request, _ in talk.sent] == ["600.000", "540.000"]
    assert REQUEST.headers == {}
    late = Talk(RetryPolicy(1.0, end_s=99.9))
    with pytest.raises(InferenceError, match=r"no answer within 1 s"):
        late.answer(DONE)
    assert late.sent == []


def test_a_wait_that_takes_longer_than_the_time_tells_what_was_found_before_it() -> None:
    """On a busy machine; that no process listens says more than that there was no answer."""
    with pytest.raises(ConnectionLost, match="cannot be reached: refused"):
        Talk(RetryPolicy(0.2), late_s=1.0).answer(REFUSED)


def test_a_client_that_is_closed_while_a_call_waits_to_be_tried_again_says_so() -> None:
    async def ask(transport: BlockingTransport | AsyncTransport) -> None:
        closing = transport.close()
        if closing is not None:
            await closing
        with pytest.raises(Closed):
            await transport.send(REQUEST, 5.0)

    for kind in (BlockingTransport, AsyncTransport):
        asyncio.run(ask(kind("http://127.0.0.1:1", "", 1)))


PROXY = "http://127.0.0.1:1"  # where nobody listens


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.upper().endswith("_PROXY") or name.startswith("SSL_CERT_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("url", "no_proxy", "found"),
    [
        ("http://gpu-7:8000", "", PROXY),
        ("http://gpu-7:8000", "localhost,127.0.0.1,::1,[::1],fd00::/8,10.0.0.0/8", PROXY),
        ("http://gpu-7:8000", "gpu-7", None),
        ("http://gpu-7:8000", "gpu-7:8000", None),
        ("http://gpu-7:8000", "gpu-7:9000", PROXY),
        ("http://gpu-7.example.org", ".example.org", None),
        ("http://gpu-7", "*", None),
        ("http://[fd00::7]:8000", "fd00::7", None),
        ("http://[fd00::7]:8000", "[fd00::7]:8000", None),
        ("http://[fd00::7]:8000", "fd00::8", PROXY),
        ("https://gpu-7", "", None),  # whose variable is another
        ("http://127.0.0.1:8000", "", None),
        ("http://localhost:8000", "", None),
        ("http://[::1]:8000", "", None),
    ],
)
def test_a_proxy_is_asked_for_hosts_elsewhere_that_need_one(
    url: str, no_proxy: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", PROXY.removeprefix("http://"))
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert find_proxy(url) == found
    Client(url).close()


def test_a_proxy_that_does_not_answer_is_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", PROXY)
    with Client("http://endpoint.invalid", num_retries=0) as client, pytest.raises(ConnectionLost, match="refused"):
        client.models()


@pytest.mark.parametrize("proxy", ["foo:secret", "socks4://127.0.0.1:1", "socks5://127.0.0.1:1"])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_proxy_that_cannot_be_spoken_to_is_refused_by_its_variable(
    kind: type[Client | AsyncClient], proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(ConfigError, match="ALL_PROXY") as raised:
        kind("http://gpu-7:8000")
    assert "secret" not in str(raised.value)


def test_certificates_that_are_none_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "nowhere.pem"))
    with pytest.raises(ConfigError, match="SSL_CERT_FILE"):
        Client("https://gpu-7:8000")
    Client("http://gpu-7:8000").close()


def test_plain_http_without_a_proxy_reads_no_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take 20 ms, at each program's first request."""
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_, **__: pytest.fail("it reads them"))
    Client("http://127.0.0.1:1").close()
