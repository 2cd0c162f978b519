"""Who may do what at the console: each rule of Access and ProtectedApp."""

import asyncio
import signal
import socket
import ssl
import tempfile
import webbrowser
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

import pytest

from certificates import Authority
from hostile_requests import REQUESTS, RUN, TOKEN
from shoal import runs
from shoal.errors import ClusterError, ConfigError
from shoal.flows.run_flow import RunFlow
from shoal.libs.console import access as access_module
from shoal.libs.console import server
from shoal.libs.console.access import COOKIE, HEADERS, MAX_FAILED_LOGINS, Access, ProtectedApp
from shoal.libs.console.job import ConsoleSpec, ConsoleTls, listen, make_context, run_console
from shoal.libs.console.notes import change_note, read_notes
from shoal.libs.console.server import build_app
from typed import typed

PORT = 8267
HOST = f"127.0.0.1:{PORT}"
SECRETS = (TOKEN.encode(), b"import", b"root:")


def ask(
    app: ProtectedApp, method: str, target: str, headers: Mapping[str, str], body: bytes = b""
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of what the application answers."""
    path, _, query = target.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", PORT),
    }  # fmt: skip
    sent: list[dict[str, object]] = []
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, object]:
        if not parts:
            await asyncio.Event().wait()  # it stays connected
        return parts.pop()

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    start = sent[0]
    answered = {name.decode(): value.decode() for name, value in start["headers"]}  # type: ignore[attr-defined]
    return start["status"], answered, b"".join(each.get("body", b"") for each in sent[1:])  # type: ignore[return-value, misc]


def log_in(app: ProtectedApp, token: str = TOKEN, origin: str = f"http://{HOST}") -> tuple[int, str]:
    """Status and cookie."""
    asked = {"host": HOST, "origin": origin, "content-type": "application/x-www-form-urlencoded"}
    status, headers, _ = ask(app, "POST", "/login", asked, f"token={token}".encode())
    return status, headers.get("set-cookie", "")


@pytest.fixture
def app() -> ProtectedApp:
    return build_app(Access(TOKEN, port=PORT))


@pytest.fixture
def run_id() -> str:
    with runs.create("lenet", "seed: 1\n", RUN) as recorder:
        recorder.log(1, {"loss": 1.0})
    change_note(RUN, {"note": "as it was"})
    return RUN


def test_a_hostile_request_is_refused_or_does_nothing(app: ProtectedApp, run_id: str) -> None:
    session = log_in(app)[1].partition(";")[0]
    for hostile in REQUESTS:
        headers = {"host": HOST, **hostile.headers}
        filled = {name: value.format(host=HOST, port=PORT, session=session) for name, value in headers.items()}
        status, answered, body = ask(app, hostile.method, hostile.target, filled, hostile.body)
        assert status in hostile.statuses, hostile.name
        assert not any(secret in body for secret in SECRETS), hostile.name
        assert "access-control-allow-origin" not in answered
        assert answered["content-security-policy"] == HEADERS["content-security-policy"]
        assert read_notes()[run_id].note == "as it was", hostile.name
    assert ask(app, "GET", f"/api/runs/{run_id}", {"host": HOST})[0] == 200


def test_the_requests_of_the_console_s_own_page_are_answered(app: ProtectedApp, run_id: str) -> None:
    status, cookie = log_in(app)
    own = {"host": f"LOCALHOST:{PORT}", "origin": f"http://localhost:{PORT}", "cookie": cookie.partition(";")[0]}
    assert status == 303
    assert ask(app, "PATCH", f"/api/runs/{run_id}", own, b'{"note": "mine"}')[0] == 200
    assert read_notes()[run_id].note == "mine"
    link = {"host": HOST, "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}  # in another site's page
    assert ask(app, "GET", "/", link)[0] == 200
    assert ask(app, "POST", "/logout", own)[0] == 204
    assert ask(app, "PATCH", f"/api/runs/{run_id}", own, b"{}")[0] == 401


def test_scripts_and_frames_of_others_are_impossible(app: ProtectedApp) -> None:
    for target in ("/", "/static/app.js", "/api/runs", "/nothing"):
        headers = ask(app, "GET", target, {"host": HOST})[1]
        policy = dict(each.strip().split(" ", 1) for each in headers["content-security-policy"].split(";"))
        assert "unsafe" not in headers["content-security-policy"]
        assert (policy["default-src"], policy["script-src"], policy["frame-ancestors"]) == (
            "'none'",
            "'self'",
            "'none'",
        )
        assert (headers["x-frame-options"], headers["x-content-type-options"]) == ("DENY", "nosniff")


def test_a_cookie_is_for_this_console_s_own_pages_alone(app: ProtectedApp) -> None:
    cookie = log_in(app)[1]
    name, *flags = (each.strip() for each in cookie.split(";"))
    assert name.startswith(f"{COOKIE}-{PORT}=")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} < set(flags)


def test_guesses_are_throttled_and_another_site_cannot_cause_that(
    app: ProtectedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(access_module.time, "monotonic", lambda: now_s)
    assert {log_in(app, "wrong", "http://evil.example")[0] for _ in range(2 * MAX_FAILED_LOGINS)} == {403}
    assert log_in(app)[0] == 303
    assert {log_in(app, "wrong")[0] for _ in range(MAX_FAILED_LOGINS)} == {403}
    assert log_in(app)[0] == 403
    now_s = access_module.FAILED_LOGINS_S + 1
    assert log_in(app)[0] == 303


def test_a_code_begins_one_session_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(access_module.time, "monotonic", lambda: now_s)
    access = Access(TOKEN, port=PORT)
    code, late = access.make_code(), access.make_code()
    assert access.begin_session(code, is_own=False)
    assert not access.begin_session(code, is_own=False)
    now_s = access_module.CODE_S + 1
    assert not access.begin_session(late, is_own=False)


def test_sessions_end_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(access_module.time, "monotonic", lambda: now_s)
    access = Access(TOKEN, port=PORT)
    sessions = [access.begin_session(TOKEN) or "" for _ in range(access_module.MAX_SESSIONS + 1)]
    assert not access.is_session(sessions[0])
    assert access.is_session(sessions[1])
    now_s = access_module.SESSION_S + 1
    assert not access.is_session(sessions[1])
    assert not access.is_session("")


def test_for_other_hosts_reading_needs_the_token_too() -> None:
    app = build_app(Access(TOKEN, port=PORT, names=("gpu-7.lab",), readable=False))
    asked = {"host": f"gpu-7.lab:{PORT}"}
    assert ask(app, "GET", "/api/runs", asked)[0] == 401
    assert ask(app, "GET", "/", asked)[0] == 200
    cookie = log_in(app)[1].partition(";")[0]
    assert ask(app, "GET", "/api/runs", {**asked, "cookie": cookie})[0] == 200
    assert ask(app, "GET", "/api/runs", {"host": "gpu-7.lab", "cookie": cookie})[0] == 200  # behind a proxy with TLS


def test_a_terminated_console_leaves_no_code_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, object] = {}
    opened: list[str] = []
    hosts: list[bool] = []

    def serve(listening: object, access: Access, context: object) -> None:
        hosts.append(access.is_own_host(f"[::1]:{listening.getsockname()[1]}"))  # type: ignore[attr-defined]
        listening.close()  # type: ignore[attr-defined]
        assert list(tmp_path.iterdir())
        handlers[signal.SIGTERM](signal.SIGTERM, None)  # type: ignore[operator]

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url))
    monkeypatch.setattr(server, "serve", serve)
    result = typed("console --port 0 --host ::1 --open")
    assert result.exit_code == 128 + signal.SIGTERM
    assert "No browser was found" in result.output
    assert opened
    assert hosts == [True]
    assert not list(tmp_path.iterdir())


def test_beyond_loopback_the_console_is_encrypted_or_says_that_it_is_not() -> None:
    for words in (["--host", "0.0.0.0"], ["--host", "gpu-7.lab", "--port", "0"]):
        refused = typed("console", *words)
        assert "insecure" in str(refused.exception), words
    with_key_alone = typed("console --host 0.0.0.0 --key web.key")
    assert "tls.certificate" in str(with_key_alone.exception)


def test_with_tls_plain_pages_and_cookies_are_none_of_the_console_s() -> None:
    app = build_app(Access(TOKEN, port=PORT, is_tls=True))
    assert log_in(app, origin=f"http://{HOST}")[0] == 403
    status, cookie = log_in(app, origin=f"https://{HOST}")
    assert (status, "Secure" in cookie) == (303, True)


def test_a_renewed_certificate_counts_for_new_connections(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.sign(days=30)
    context = make_context(ConsoleTls(certificate=str(tmp_path / "server.pem"), key=str(tmp_path / "server.key")))
    first = read_certificate_end(context, authority)
    authority.sign(days=60)
    assert read_certificate_end(context, authority) > first
    newest = (tmp_path / "server.pem").read_bytes()
    (tmp_path / "server.pem").write_text("half of it")  # as between two writes
    assert read_certificate_end(context, authority) > first
    (tmp_path / "server.pem").write_bytes(newest)
    with pytest.raises(ConfigError, match="cannot be used"):
        make_context(ConsoleTls(certificate=str(tmp_path / "server.pem"), key=str(tmp_path / "none.key")))


def read_certificate_end(context: ssl.SSLContext, authority: Authority) -> float:
    """When the certificate of a new connection ends, as a client sees it that trusts the authority."""
    client_in, client_out = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cafile=str(authority.ca))
    asked = client.wrap_bio(client_in, client_out, server_hostname="localhost")
    answered = context.wrap_bio(client_out, client_in, server_side=True)
    for side in (asked, answered, asked):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    found = asked.getpeercert()
    assert found
    return ssl.cert_time_to_seconds(str(found["notAfter"]))


@pytest.mark.parametrize("host", ["127.0.0.1", "no.such.host.invalid"])
def test_an_address_that_is_taken_or_unknown_is_named_with_the_reason(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ClusterError) as refused:
        listen(ConsoleSpec(insecure=True, host=host, port=other.getsockname()[1]))
    assert host in str(refused.value)
    assert "Unknown error" not in str(refused.value)


def test_a_job_s_record_has_the_address_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def serve(listening: socket.socket, access: Access, context: object) -> None:
        (entry,) = runs.load("latest").endpoints()
        seen.append((entry.address, entry.state))
        assert access.is_own_host(f"localhost:{listening.getsockname()[1]}")
        listening.close()
        raise KeyboardInterrupt  # as a stopped job has it

    monkeypatch.setattr(server, "serve", serve)
    with pytest.raises(KeyboardInterrupt):
        RunFlow("console", ConsoleSpec(), run_console).start(ConsoleSpec(port=0))
    ((address, state),) = seen
    assert (address.startswith("http://127.0.0.1:"), state) == (True, "ready")
    record = runs.load("latest")
    assert (record.status.value, record.endpoints()[0].state) == ("stopped", "closed")
