"""The paths below /v1/ as a bare ASGI application: keys, bodies, errors, and streams of server-sent events.

An answer's head is sent with its first token, so that whatever is refused has its status. A stream waits for its
client: it takes the next event once the last one is sent. A client that takes none for `answer_grace_s`, or that has
gone, ends its request. What is large is parsed, rendered and divided into tokens in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from time import monotonic
from typing import Any, TypeVar

import msgspec

from shoal.errors import Closed, ConfigError, InferenceError
from shoal.extend.serve import (
    FORWARDED_FROM_HEADER,
    GENERATION_HEADER,
    PEER_HEADER,
    AccessControl,
    Caller,
    Disconnected,
    Message,
    PeerTransport,
    Receive,
    RequestLifecycle,
    RequestsInProgress,
    Scope,
    Send,
    compute_deadline,
    decode_in_thread,
    decompress_in_thread,
    guard_stream,
    read_side,
)
from shoal.libs.language.api.answers import begin, merge_events
from shoal.libs.language.api.bodies import CountBody, EmbeddingBody, Fields, read_body
from shoal.libs.language.api.chat import CHAT, COMPLETIONS, Api, prepare_embedding, write_embeddings, write_frame
from shoal.libs.language.api.messages import MESSAGES
from shoal.libs.language.api.prompt import Job
from shoal.libs.language.api.responses import RESPONSES
from shoal.libs.language.text_model import Hop, TextCall, TextModel, TextModels
from shoal.serve.http.response import JSON_TYPE, build_error_response, read_length
from shoal.serve.protocol.request_limits import RequestLimits

logger = logging.getLogger(__name__)
T = TypeVar("T")
Headers = Mapping[bytes, bytes]
PREFIX = "/v1/"
APIS = {"chat/completions": CHAT, "completions": COMPLETIONS, "responses": RESPONSES, "messages": MESSAGES}
BODIES: dict[str, type] = {path: api.body for path, api in APIS.items()}
BODIES |= {"messages/count_tokens": CountBody, "embeddings": EmbeddingBody}
SMALL_BYTES = 16_384  # below it, a few milliseconds of the event loop
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_TYPES |= {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 504: "timeout_error"}
HOP_HEADERS = ("host", "origin", "connection", "expect", "content-length", "content-encoding", "transfer-encoding")
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


def make_app(models: TextModels, access: AccessControl, limits: RequestLimits) -> LanguageApp:
    """The application of the paths below `PREFIX`, behind any root."""
    return LanguageApp(models, access, limits)


class LanguageApp:
    """Answers stock clients of OpenAI and Anthropic."""

    def __init__(self, models: TextModels, access: AccessControl, limits: RequestLimits) -> None:
        self._models, self._access, self._limits = models, access, limits
        self._in_progress = RequestsInProgress(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        path = scope["path"].partition(PREFIX)[2]
        is_anthropic = path.startswith("messages") or b"anthropic-version" in headers
        reply = _Reply(send, is_anthropic, self._limits.answer_grace_s, self._models.replica)
        try:
            await self._answer(scope, path, headers, receive, reply)
        except Disconnected:
            return
        except InferenceError as error:
            await reply.send_error(error)
        except ConfigError as error:
            await reply.send_error(InferenceError(400, str(error), field=error.field))
        except RecursionError:
            await reply.send_error(InferenceError(400, "the body is nested too deeply"))
        except Closed:
            await reply.send_error(InferenceError(503, "the endpoint is closing; try again later"))
        except Exception as error:
            logger.exception("a request failed")
            await reply.send_error(InferenceError(500, f"this request failed: {type(error).__name__}: {error}"))

    async def _answer(self, scope: Scope, path: str, headers: Headers, receive: Receive, reply: _Reply) -> None:
        self._limits.check_head(scope["path"], scope["headers"])
        key = headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")
        origin = headers.get(FORWARDED_FROM_HEADER, b"")
        self._access.require_known_key(key, origin)
        is_get = path == "models" or path.startswith(("models/", "responses/"))
        if not is_get and path not in BODIES:
            known = ", ".join(f"{PREFIX}{each}" for each in (*BODIES, "models"))
            remedy = f"base_url of an OpenAI client must end in /v1, of Anthropic's must not; there are {known}"
            raise InferenceError(404, f"no such path: {scope['path'][:200]!r}: {remedy}")
        reply.method = "GET" if is_get else "POST"
        if scope["method"] != reply.method:
            raise InferenceError(405, f"{scope['method']} is not allowed here")
        if is_get:
            await reply.send_json(self._get(path, self._access.admit(key, origin=origin)))
            return
        with RequestLifecycle(self._in_progress, receive) as progress:
            arrived_s = time.monotonic()
            body = await progress.read_body(read_length(headers, b"content-length"))
            body = await decompress_in_thread(self._limits, body, headers.get(b"content-encoding", b"identity"))
            size_bytes = len(body)
            fields: Any = await _run(size_bytes, read_body, body, BODIES[path])
            # A replica that passes a request on has counted it.
            is_counted = not self._models.is_peer(headers.get(PEER_HEADER, b""))
            caller = self._access.admit(key, fields.model.partition("@")[0], origin=origin, is_counted=is_counted)
            if not await self._load(fields.model, path, headers, body, reply, arrived_s):
                return
            model, call = self._find(fields.model, caller, headers)
            if isinstance(fields, EmbeddingBody):
                prompts = await _run(size_bytes, prepare_embedding, model, fields)
                read, _ = self._access.admit_tokens(call.caller, sum(map(len, prompts)))
                vectors, version = await model.embed(prompts, call)
                read.add(sum(map(len, prompts)))
                reply.name_version(version)
                await reply.send_json(write_embeddings(fields, sum(map(len, prompts)), vectors))
                return
            _apply_deadline(fields, headers, arrived_s)
            api = APIS.get(path, MESSAGES)
            job: Job = await _run(size_bytes, api.prepare, model, fields)
            if isinstance(fields, CountBody):
                await reply.send_json({"input_tokens": job.num_prompt_tokens})
            else:
                if fields.given:
                    if not (call.resume or fields.seed is not None or fields.temperature == 0):  # another answer's rest
                        problem = "given: needs the idempotency-key of its answer, or the seed"
                        raise InferenceError(400, problem, field="given")
                    call = replace(call, last_version=fields.given[-1][0])
                await self._generate(api, job, call, reply)

    async def _load(self, name: str, path: str, headers: Headers, body: bytes, reply: _Reply, arrived_s: float) -> bool:
        """See `TextModels.load`."""
        deadline_s = compute_deadline(arrived_s, None, headers, None)

        async def relay(transport: PeerTransport, address: str, more: Mapping[str, str]) -> None:
            given = {each.decode("latin-1"): value.decode("latin-1") for each, value in headers.items()}
            given = {each: value for each, value in given.items() if each not in HOP_HEADERS}
            if deadline_s is not None:
                given["shoal-deadline-ms"] = f"{max(1e-3, 1e3 * (deadline_s - time.monotonic())):.3f}"
            async with reply.watch():
                await transport.relay(address, PREFIX + path, {**given, **more}, body, reply.relay)

        hop = Hop(deadline_s, headers.get(PEER_HEADER, b""), headers.get(GENERATION_HEADER, b""), relay)
        try:
            return await self._models.load(name.partition("@")[0], hop)
        except InferenceError as error:
            raise InferenceError(error.status, error.message, error.retry_after_s, "model") from error

    def _find(self, name: str, caller: Caller, headers: Headers) -> tuple[TextModel, TextCall]:
        """The model of `name` or `name@version`, and the call of it. Raises InferenceError (400, 403, 404)."""
        name, at, version = name.partition("@")
        if at and not (version.isascii() and version.isdigit() and len(version) < 19):
            remedy = f"leave it out, or write {name[:200]}@2"
            raise InferenceError(400, f"model: {version[:40]!r} is no number of a version: {remedy}", field="model")
        try:
            model = self._models.get(name, caller)
        except InferenceError as error:
            raise InferenceError(error.status, error.message, error.retry_after_s, "model") from error
        track, sticky = read_side(headers)
        resume = headers.get(b"idempotency-key", b"").decode("latin-1")
        return model, TextCall(caller, int(version) if at else None, sticky, track, resume)

    async def _generate(self, api: Api, job: Job, call: TextCall, reply: _Reply) -> None:
        num_input = sum(len(each.prompt) + len(each.given) for each in job.requests)
        read, written = self._access.admit_tokens(call.caller, num_input)
        async with aclosing(merge_events(job, call)) as events:
            try:
                answers = await begin(job, events, call.resume, written.add)
            except asyncio.CancelledError:  # its client has left: so much may have been computed
                read.add(num_input)
                raise
            read.add(num_input)
            if job.body.given:
                await asyncio.to_thread(answers.all[0].replay, job)
            reply.name_version(answers.first[1].version)
            if job.body.stream:
                async with aclosing(api.stream(answers)) as frames:
                    await reply.send_stream(frames)
                return
            content = await api.write(answers)
        await reply.send_json(content)

    def _get(self, path: str, caller: Caller) -> dict[str, Any]:
        kind, _, name = path.partition("/")
        if kind == "responses":
            raise InferenceError(404, "responses are not stored: send the earlier messages as input")
        if name:
            return _describe_model(self._models.get(name, caller))
        data = [_describe_model(each) for each in self._models.list(caller)]
        ids = [each["id"] for each in data] or [None]
        return {"object": "list", "data": data, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}


async def _run(size_bytes: int, work: Callable[..., T], *arguments: object) -> T:
    """Run what depends on a body of so many bytes: at once for a small one, in a thread for a large one."""
    if size_bytes <= SMALL_BYTES:
        return work(*arguments)
    return await decode_in_thread(size_bytes, work, *arguments)


class _Reply:
    """Writes one answer: JSON, a stream, or an error, in the form of the API that was called."""

    def __init__(self, send: Send, is_anthropic: bool, grace_s: float, replica: str) -> None:
        self._send, self._is_anthropic, self._grace_s, self._replica = send, is_anthropic, grace_s, replica
        self._has_started, self.method, self._since_s = False, "", 0.0  # when the event was given that is being sent
        self._headers: list[tuple[bytes, bytes]] = []

    def name_version(self, version: int | str) -> None:
        self._headers.append((b"shoal-model-version", str(version).encode()))

    async def relay(self, message: Message) -> None:
        """Send a part of another replica's answer."""
        self._has_started, self._since_s = True, monotonic()
        await self._send(message)
        self._since_s = 0.0

    async def send_json(self, content: object, status: int = 200) -> None:
        body = msgspec.json.encode(content)
        head = [(b"content-type", JSON_TYPE), (b"content-length", b"%d" % len(body)), *self._headers]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": body})

    async def send_stream(self, frames: AsyncIterator[bytes]) -> None:
        """Send server-sent events as fast as the client takes them. Raises Disconnected where it takes none."""
        self._has_started = True
        died = self._write_last(InferenceError(503, "it has died"))
        start = {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS + self._headers}
        async with self.watch():
            await self._send(start | {"guard": guard_stream(b"%x\r\n%b\r\n0\r\n\r\n" % (len(died), died))})
            async for frame in frames:
                self._since_s = monotonic()
                await self._send({"type": "http.response.body", "body": frame, "more_body": True})
                self._since_s = 0.0
        await self._send({"type": "http.response.body", "body": b""})

    async def send_error(self, error: InferenceError) -> None:
        """Send an error, as the stream's last event if it has begun."""
        if self._has_started:
            with suppress(Disconnected):
                async with self.watch():
                    self._since_s = monotonic()
                    await self._send({"type": "http.response.body", "body": self._write_last(error)})
            return
        self._headers = build_error_response(error, self.method).headers
        await self.send_json(self._describe(error), error.status)

    def _write_last(self, error: InferenceError) -> bytes:
        """The event of an error that ends a stream; one of a replica that ends names it."""
        if error.status == 503:
            remedy = "With an idempotency-key, send the request again, and as `given` what has come"
            error = InferenceError(503, f"replica {self._replica} ends this stream: {error.message}. {remedy}")
        return write_frame(self._describe(error), "error" if self._is_anthropic else "")

    def _describe(self, error: InferenceError) -> dict[str, Any]:
        kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        if self._is_anthropic:
            return {"type": "error", "error": {"type": kind, "message": error.message}}
        code = "context_length_exceeded" if " context of " in error.message else None
        code = "model_not_found" if error.status == 404 and error.field == "model" else code
        described = {"message": error.message, "type": kind, "param": error.field or None, "code": code}
        return {"error": described | {"status": error.status}}  # of an error within a stream, too

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Raise Disconnected where one `_send` takes longer than the grace. A timer for each event would cost more than
        making it."""
        loop = asyncio.get_running_loop()

        def check() -> None:
            since_s = self._since_s or monotonic()
            if monotonic() - since_s >= self._grace_s:
                limit.reschedule(loop.time())
            else:
                timers[0] = loop.call_later(since_s + self._grace_s - monotonic(), check)

        timers = [loop.call_later(self._grace_s, check)]
        try:
            async with asyncio.timeout(None) as limit:
                yield
        except TimeoutError:
            raise Disconnected from None
        finally:
            timers[0].cancel()


def _apply_deadline(body: Fields, headers: Headers, arrived_s: float) -> None:
    """The sooner of the body's deadline and the header's. Raises InferenceError (400)."""
    now_s = time.monotonic()
    by_header_s = compute_deadline(arrived_s, None, headers, None)
    if by_header_s is not None:
        left_s = max(by_header_s - now_s, 1e-3)
        body.deadline_s = left_s if body.deadline_s is None else min(left_s, body.deadline_s)


def _describe_model(model: TextModel) -> dict[str, Any]:
    """As both APIs have it."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.created_s))
    known = {"id": model.name, "object": "model", "created": int(model.created_s), "owned_by": "shoal"}
    known |= {"type": "model", "display_name": model.name, "created_at": stamp, "max_input_tokens": model.context}
    return known | {"has_chat_template": bool(model.tokenizer.chat_template)}
