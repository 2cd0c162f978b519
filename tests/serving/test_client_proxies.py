"""The clients beside what an environment says of proxies and certificates."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest

from shoal.client import AsyncClient, Client
from shoal.client.address import find_proxy
from shoal.errors import ConfigError, ConnectionLost

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
