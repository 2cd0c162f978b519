"""The HTTP paths of sessions, as a bare ASGI application: `/shoal/v1/sessions` for drivers, `/s/ID/v1/` for agents.

Below `/s/` the language API answers, with its model in place of the session's. Status codes are chosen by what stock
clients do: 408, 409, 429, 5xx come again, nothing else does (docs/agents-protocol.md).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from shoal.errors import InferenceError
from shoal.extend.serve import AccessControl, Message, Receive, Scope, Send
from shoal.libs.agents.sessions.service import SessionError, SessionService
from shoal.libs.agents.sessions.session import AgentSession, Ending, Opening, Reward
from shoal.libs.agents.sessions.texts import SessionTexts
from shoal.libs.language.api.app import LanguageApp
from shoal.serve.protocol.request_limits import RequestLimits

MAX_RUNNING = 64  # requests of one session at a time: others wait
_AGENT = re.compile(r"/s/(s[0-9a-f]{20})(/.*)")
_REPLY_ID = re.compile(rb'"id":"([^"]{1,80})"')
_JSON = [(b"content-type", b"application/json")]
Json = dict[str, Any]
Headers = Mapping[bytes, bytes]


class AnswerReward(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST …/rewards`. reply: the id of the answer"""

    reply: str = msgspec.field(name="turn")
    reward: Reward


class Exchange:
    """An answer of the language API on its way: collected for who asks again, and held back until its turns are on the
    disk. send: of its client; None where it is collected alone."""

    def __init__(self, service: SessionService, texts: SessionTexts, request: bytes, send: Send | None) -> None:
        self._service = service
        self._texts = texts
        self._request = request
        self._send = send
        self._head: Message = {}
        self._body: list[bytes] = []

    async def send(self, message: Message) -> None:
        """Takes what the language API sends."""
        if message["type"] == "http.response.start":
            self._head = message
            self._body.clear()  # of an answer that could not be written
        else:
            self._body.append(message.get("body", b""))
            await self.write(is_last=not message.get("more_body", False))
        if self._send is not None:
            await self._send(message)

    async def deliver(self, send: Send) -> None:
        """Send what was collected."""
        await _reply(send, self._head["status"], self._head["headers"], b"".join(self._body))

    async def write(self, is_last: bool) -> None:
        """Write the turns that there are: with the last part of an answer, or since its client has left."""
        turns, self._texts.turns = self._texts.turns, []
        is_whole = is_last and self._head["status"] == 200
        if not (turns or is_whole):
            return
        body = b"".join(self._body)
        found = _REPLY_ID.search(body)
        answer = None
        if is_whole:
            answer = self._request, msgspec.msgpack.encode(self._head["headers"]), body
        await self._service.write_turns(self._texts.session, turns, found[1].decode() if found else "", answer)


class SessionApp:
    """token: of the run, by which drivers open sessions. url: of this server, for clients; "": that which a request
    names"""

    def __init__(self, service: SessionService, token: str, url: str = "") -> None:
        self._service = service
        self._key = hashlib.sha256(token.encode()).digest()
        self._url = url
        self._limits = RequestLimits()
        self._access = AccessControl(None, [])
        self._running: dict[tuple[str, bytes], deque[asyncio.Task[Exchange]]] = {}  # equal ones are several samples

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        try:
            if match := _AGENT.fullmatch(scope["path"]):
                await self._converse(match[1], scope, headers, receive, send)
            else:
                status, content = await self._administer(scope, headers, receive)
                await _reply(send, status, _JSON, b"" if content is None else msgspec.json.encode(content))
        except InferenceError as error:
            await _send_error(send, error, scope["path"])
        except msgspec.DecodeError as error:
            await _send_error(send, SessionError(400, "invalid", f"the body: {error}"), scope["path"])

    # -- drivers --------------------------------------------------------------------------------------------------

    async def _administer(self, scope: Scope, headers: Headers, receive: Receive) -> tuple[int, Any]:
        """The status and the content of an answer."""
        service = self._service
        match [scope["method"], *scope["path"].rstrip("/").split("/")[1:]]:
            case ["POST", "shoal", "v1", "sessions"]:
                _require_key(headers, "the run's", self._key)
                opening = msgspec.json.decode(await self._read(receive), type=Opening)
                session, key = await service.open(opening, headers.get(b"idempotency-key", b"").decode("latin-1"))
                return 201, self._describe_opened(scope, headers, session, key)
            case ["GET", "shoal", "v1", "sessions", session_id]:
                _require_key(headers, "the run's", self._key)
                return 200, service.load(session_id).export()
            case ["POST", "shoal", "v1", "sessions", session_id, "end" | "rewards" | "touch" as verb]:
                _require_key(headers, "the session's or the run's", self._key, service.find_key(session_id))
                body = await self._read(receive)
                if verb == "end":
                    return 200, await service.end(session_id, msgspec.json.decode(body, type=Ending))
                session = service.touch(session_id)
                if verb == "touch":
                    return 204, None
                given = msgspec.json.decode(body, type=AnswerReward)
                await service.reward_answer(session, given.reply, given.reward)
                return 200, {}
        raise SessionError(404, "no_such_path", f"there is no {scope['method']} {scope['path'][:200]!r}")

    def _describe_opened(self, scope: Scope, headers: Headers, session: AgentSession, key: str) -> Json:
        origin = self._url or f"{scope['scheme']}://{headers[b'host'].decode('latin-1')}"
        root = f"{origin}/s/{session.id}"
        environment = {
            "OPENAI_BASE_URL": f"{root}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": key,
        }
        return {
            "id": session.id,
            "base_url": f"{root}/v1",
            "key": key,
            "env": environment,
            "version": session.opening.version or self._service.get_version(),
            "expires_at": datetime.fromtimestamp(session.expires_at, UTC).isoformat(),
        }

    # -- agents ---------------------------------------------------------------------------------------------------

    async def _converse(self, session_id: str, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        _require_key(headers, "that of this session", self._service.find_key(session_id))
        body = await self._read(receive)
        session = self._service.touch(session_id)
        if scope["method"] != "POST":
            app = LanguageApp(SessionTexts(self._service, session), self._access, self._limits)
            await app(scope, receive, send)
            return
        named, retries = headers.get(b"idempotency-key", b""), headers.get(b"x-stainless-retry-count", b"")
        request = hashlib.blake2b(b"\0".join((scope["path"].encode(), named, body)), digest_size=16).digest()
        if named or (retries.isdigit() and int(retries)):
            if running := self._running.get((session_id, request)):
                self._service.counts["repeated"] += 1
                running.rotate(-1)  # repetitions of several get one each
                await (await asyncio.shield(running[-1])).deliver(send)
                return
            if (written := self._service.find_answer(session, request)) is not None:
                self._service.counts["repeated"] += 1
                head = msgspec.msgpack.decode(written[0], type=list[tuple[bytes, bytes]])
                await _reply(send, 200, head, written[1])
                return
        if session.num_running >= MAX_RUNNING:
            raise SessionError(429, "too_many_requests", f"the session has {MAX_RUNNING} requests in progress", 1.0)
        texts = SessionTexts(self._service, session)
        is_stream = re.search(rb'"stream"\s*:\s*true', body) is not None
        exchange = Exchange(self._service, texts, request, send if is_stream else None)
        app = LanguageApp(texts, self._access, self._limits)
        own = b"authorization", b"x-api-key", b"idempotency-key"
        scope = {**scope, "headers": [each for each in scope["headers"] if each[0] not in own]}
        session.num_running += 1
        answering = self._answer(app, scope, _replay(body, receive if is_stream else None), exchange, session)
        if is_stream:
            await answering
            return
        # Its client may leave and ask again: it gets this answer.
        task = asyncio.ensure_future(answering)
        equal = self._running.setdefault((session_id, request), deque())
        equal.append(task)
        task.add_done_callback(equal.remove)
        task.add_done_callback(lambda _: equal or self._running.pop((session_id, request), None))
        await (await asyncio.shield(task)).deliver(send)

    async def _answer(
        self, app: LanguageApp, scope: Scope, receive: Receive, exchange: Exchange, session: AgentSession
    ) -> Exchange:
        try:
            await app(scope, receive, exchange.send)
        finally:
            session.num_running -= 1
            session.seen_at = time.time()
            await exchange.write(is_last=False)
        return exchange

    # -- keys and bodies ------------------------------------------------------------------------------------------

    async def _read(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise InferenceError(400, "the client has left")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._limits.max_body_bytes:
                raise InferenceError(413, f"the body is larger than {self._limits.max_body_bytes} bytes")
            if not message.get("more_body", False):
                return b"".join(parts)


def _require_key(headers: Headers, whose: str, *hashes: bytes) -> None:
    """Raises InferenceError (401) for a key that has none of these hashes."""
    given = headers.get(b"authorization") or headers.get(b"x-api-key", b"")
    hashed = hashlib.sha256(given.removeprefix(b"Bearer ").strip()).digest()
    if not any(hmac.compare_digest(hashed, each) for each in hashes):
        raise InferenceError(401, f"the key is not {whose}: authorization: Bearer KEY")


def _replay(body: bytes, receive: Receive | None) -> Receive:
    """What the application receives: the body, then what its client does; nothing, where that does not matter."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        if messages:
            return messages.pop()
        if receive is None:
            await asyncio.Event().wait()
        assert receive is not None
        return await receive()

    return replay


async def _reply(send: Send, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
    head = [each for each in headers if each[0] != b"content-length"]
    await send(
        {"type": "http.response.start", "status": status, "headers": [*head, (b"content-length", b"%d" % len(body))]}
    )
    await send({"type": "http.response.body", "body": body})


async def _send_error(send: Send, error: InferenceError, path: str) -> None:
    described = {"message": error.message, "type": "invalid_request_error", "code": error.code or None}
    content: Json = {"error": {**described, "param": error.field or None}}
    if path.endswith(("/messages", "/messages/count_tokens")):  # Anthropic's
        content["type"] = "error"
    headers = list(_JSON)
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after_s))))
    elif error.status not in (503, 504):
        headers.append((b"x-should-retry", b"false"))
    await _reply(send, error.status, headers, msgspec.json.encode(content))
