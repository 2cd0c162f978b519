"""Who may do what at the console, and what a browser may do with its pages.

An ASGI application around the console's. A request is refused whose Host is none of the console's names (a name of
another site that leads here), or that another site's page has caused; each answer tells the browser to load nothing
from elsewhere, to run no text as a script, and to show the page in no frame.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "shoal-console"
SESSION_S = 12 * 3600.0
MAX_SESSIONS = 100
MAX_LOGIN_BYTES = 4096
CODE_S = 60.0
MAX_FAILED_LOGINS, FAILED_LOGINS_S = 10, 60.0
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_SAFE_METHODS = frozenset({"GET", "HEAD"})
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:;"
        " connect-src 'self'; font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with "no-referrer" browsers hide the origin of the own page's changes, too
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class Access:
    """The sessions of browsers that have shown the token, in memory.

    names:    of this host, beside loopback's: what a browser may have in its address line
    readable: whether one may read without the token
    is_tls:   whether browsers reach it by https alone
    """

    def __init__(
        self, token: str, *, port: int, names: tuple[str, ...] = (), readable: bool = True, is_tls: bool = False
    ) -> None:
        self.token, self._readable = token, readable
        self.cookie_flags = "; Secure" if is_tls else ""
        default = ":443" if is_tls else ":80"
        own = {f"{name}:{port}".removesuffix(default) for name in (*_LOCAL_NAMES, *names)}
        self._hosts = {host.lower() for host in (*own, *names)}  # a name alone: a proxy with TLS is before it
        schemes = ("https",) if is_tls else ("http", "https")
        self._origins = {f"{scheme}://{host}" for scheme in schemes for host in self._hosts}
        self.cookie = f"{COOKIE}-{port}"  # a browser sends a cookie to all ports of a host
        self._codes: dict[str, float] = {}  # until when
        self._sessions: dict[str, float] = {}  # likewise
        self._failures: deque[float] = deque(maxlen=MAX_FAILED_LOGINS)

    def find_rejection(
        self, method: str, path: str, headers: Mapping[str, str], *, may_write: bool
    ) -> tuple[int, str] | None:
        """The status and the text with which a request is refused; None for one that is answered."""
        is_change = method not in _SAFE_METHODS
        is_navigation = headers.get("sec-fetch-mode") == "navigate"
        # "same-site" is another port of this host: a server that another user of it may have.
        is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site") and not is_navigation
        if not self.is_own_host(headers.get("host", "")):
            return 421, "this console has another name: start it with --name for each name of its host"
        if path == "/login" and method == "POST":
            return None
        if is_foreign or (is_change and not self.is_own_origin(headers.get("origin", "null"))):
            return 403, "a page of another site asks"
        if not may_write and (is_change or (path.startswith("/api/") and not self._readable)):
            return 401, "log in with the access token first"
        return None

    def is_own_host(self, host: str) -> bool:
        return host.lower() in self._hosts

    def is_own_origin(self, origin: str) -> bool:
        return origin.lower() in self._origins

    def make_code(self) -> str:
        """A code that begins one session in place of the token, within CODE_S."""
        code = secrets.token_urlsafe(32)
        self._codes[code] = time.monotonic() + CODE_S
        return code

    def begin_session(self, token: str, *, is_own: bool = True) -> str | None:
        """The cookie of a new session; None for a wrong token, and after too many wrong ones for a while.

        is_own: False: a page of another site has sent it: only a code counts, and nothing is counted as wrong
        """
        now = time.monotonic()
        if self._codes.pop(token, 0.0) > now:
            return self._make_session(now)
        if not is_own:
            return None
        if len(self._failures) == MAX_FAILED_LOGINS and now - self._failures[0] < FAILED_LOGINS_S:
            return None
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            self._failures.append(now)
            return None
        return self._make_session(now)

    def _make_session(self, now: float) -> str:
        self._sessions = {name: until for name, until in self._sessions.items() if until > now}
        while len(self._sessions) >= MAX_SESSIONS:
            self._sessions.pop(next(iter(self._sessions)))
        session = secrets.token_urlsafe(32)
        self._sessions[session] = now + SESSION_S
        return session

    def end_session(self, session: str) -> None:
        self._sessions.pop(session, None)

    def is_session(self, session: str) -> bool:
        return self._sessions.get(session, 0.0) > time.monotonic()


class ProtectedApp:
    """The console's application, behind `access`. `scope["state"]["may_write"]` tells it who asks."""

    def __init__(self, app: App, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_protected(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = {name.lower() for name, _ in message["headers"]}
                added = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in own]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        session = read_session(headers, self._access.cookie)
        scope.setdefault("state", {})["may_write"] = may_write = self._access.is_session(session)
        rejection = self._access.find_rejection(scope["method"], scope["path"], headers, may_write=may_write)
        if rejection is not None:
            await send_text(send_protected, *rejection)
        elif scope["path"] == "/login" and scope["method"] == "POST":
            is_own = self._access.is_own_origin(headers.get("origin", "null"))
            await self._log_in(receive, send_protected, is_own)
        elif scope["path"] == "/logout" and scope["method"] == "POST":
            self._access.end_session(session)
            await send_text(send_protected, 204, "")
        else:
            await self._app(scope, receive, send_protected)

    async def _log_in(self, receive: Receive, send: Send, is_own: bool) -> None:
        """With the token by the console's own page, with a code by any: that of `--open` is a file."""
        body, more = b"", True
        while more and len(body) <= MAX_LOGIN_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        token = parse_qs(body[:MAX_LOGIN_BYTES].decode("latin-1")).get("token", [""])[0].strip()
        session = self._access.begin_session(token, is_own=is_own)
        if session is None:
            await send_text(
                send, 403, "this is not the access token, or too many wrong ones came: see `shoal console --help`"
            )
            return
        flags = f"Path=/; HttpOnly; SameSite=Strict; Max-Age={int(SESSION_S)}{self._access.cookie_flags}"
        cookie = f"{self._access.cookie}={session}; {flags}"
        headers = [(b"location", b"/"), (b"set-cookie", cookie.encode()), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 303, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


def read_session(headers: Mapping[str, str], cookie: str) -> str:
    """The session that a request's cookie names; "" for none."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(cookie)
    except CookieError:
        return ""
    return found.value if found else ""


async def send_text(send: Send, status: int, text: str) -> None:
    """Answer with plain text."""
    body = text.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
