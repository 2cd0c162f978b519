"""The paths below /v1/ as a bare ASGI application: keys, bodies, errors, and streams of server-sent events.

An answer's head is sent with its first token, so that whatever is refused has its status. A stream waits for its
client: it takes the next event once the last one is sent. A client that takes none for `answer_grace_s`, or that has
gone, ends its request. What is large is parsed, rendered and divided into tokens in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from shoal.errors import ConfigError, InferenceError
from shoal.extend.serve import (
    FORWARDED_FROM_HEADER,
    PEER_HEADER,
    AccessControl,
    Caller,
    Disconnected,
    HttpRequest,
    Message,
    Receive,
    RequestLifecycle,
    RequestsInProgress,
    Scope,
    Send,
    compute_deadline,
    decode_sized,
    guard_stream,
    read_body,
    read_side,
    to_inference_error,
)
from shoal.libs.language.api.answers import begin, merge_events
from shoal.libs.language.api.bodies import CountBody, EmbeddingBody, Json, read_fields
from shoal.libs.language.api.chat import CHAT, COMPLETIONS, Api, prepare_embedding, write_embeddings, write_frame
from shoal.libs.language.api.messages import MESSAGES
from shoal.libs.language.api.prompt import Job
from shoal.libs.language.api.responses import RESPONSES
from shoal.libs.language.text_model import TextCall, TextModel, TextModels
from shoal.serve.http.response import JSON_TYPE, build_error_response
from shoal.serve.protocol.request_limits import RequestLimits

Headers = Mapping[bytes, bytes]
PREFIX = "/v1/"
APIS = {"chat/completions": CHAT, "completions": COMPLETIONS, "responses": RESPONSES, "messages": MESSAGES}
BODIES: dict[str, type] = {path: api.body for path, api in APIS.items()}
BODIES |= {"messages/count_tokens": CountBody, "embeddings": EmbeddingBody}
SMALL_BYTES = 16_384  # below it, a few milliseconds of the event loop
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_TYPES |= {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 504: "timeout_error"}
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class LanguageApp:
    """Answers stock clients of OpenAI and Anthropic, at the paths below `PREFIX`, behind any root."""

    def __init__(self, models: TextModels, access: AccessControl, limits: RequestLimits) -> None:
        self._models = models
        self._access = access
        self._limits = limits
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
        except ConfigError as error:
            await reply.send_error(InferenceError(400, str(error), field=error.field))
        except RecursionError:
            await reply.send_error(InferenceError(400, "the body is nested too deeply"))
        except Exception as error:  # noqa: BLE001 - a request's top: `to_inference_error` logs a bug
            await reply.send_error(to_inference_error(error))

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
            reply.progress, arrived_s = progress, time.monotonic()
            body = await read_body(progress, headers)
            run = partial(decode_sized, len(body), large_bytes=SMALL_BYTES)
            fields: Any = await run(read_fields, body, BODIES[path])
            # A replica that passes a request on has counted it.
            is_counted = not self._models.is_peer(headers.get(PEER_HEADER, b""))
            caller = self._access.admit(key, fields.model.partition("@")[0], origin=origin, is_counted=is_counted)
            request = HttpRequest(PREFIX + path, headers, body, compute_deadline(arrived_s, None, headers, None))
            model, call = await self._find(fields.model, caller, request, reply)
            if isinstance(fields, EmbeddingBody):
                prompts = await run(prepare_embedding, model, fields)
                num_input = sum(map(len, prompts))
                read, _ = self._access.admit_tokens(call.caller, num_input)
                vectors, version = await model.embed(prompts, call)
                read.add(num_input)
                reply.name_version(version)
                await reply.send_json(write_embeddings(fields, num_input, vectors))
                return
            if request.deadline_s is not None:  # the sooner of the header's and the body's
                left_s = max(request.deadline_s - time.monotonic(), 1e-3)
                fields.deadline_s = left_s if fields.deadline_s is None else min(left_s, fields.deadline_s)
            api = APIS.get(path, MESSAGES)
            job: Job = await run(api.prepare, model, fields)
            if isinstance(fields, CountBody):
                await reply.send_json({"input_tokens": job.num_prompt_tokens})
            else:
                if fields.given:
                    if not (call.resume or fields.seed is not None or fields.temperature == 0):  # another answer's rest
                        problem = "given: needs the idempotency-key of its answer, or the seed"
                        raise InferenceError(400, problem, field="given")
                    call = replace(call, last_version=fields.given[-1][0])
                await self._generate(api, job, call, reply)

    async def _find(self, name: str, caller: Caller, request: HttpRequest, reply: _Reply) -> tuple[TextModel, TextCall]:
        """The model of `name` or `name@version`, once it is loaded here, and the call of it. Raises Relayed, and
        InferenceError (400, 403, 404, 503, 504)."""
        name, at, version = name.partition("@")
        try:
            await self._models.load(name, request, reply.send_part)
            if at and not (version.isascii() and version.isdigit() and len(version) < 19):
                remedy = f"leave it out, or write {name[:200]}@2"
                raise InferenceError(400, f"model: {version[:40]!r} is no number of a version: {remedy}")
            model = self._models.get(name, caller)
        except InferenceError as error:
            raise InferenceError(error.status, error.message, error.retry_after_s, "model") from error
        track, sticky = read_side(request.headers)
        resume = request.headers.get(b"idempotency-key", b"").decode("latin-1")
        return model, TextCall(caller, int(version) if at else None, sticky, track, resume)

    async def _generate(self, api: Api, job: Job, call: TextCall, reply: _Reply) -> None:
        num_input = sum(len(each.prompt) + len(each.given) for each in job.requests)
        read, written = self._access.admit_tokens(call.caller, num_input)
        async with aclosing(merge_events(job, replace(call, is_stream=job.body.stream))) as events:
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
            await answers.finish()
        await reply.send_json(api.write(answers))

    def _get(self, path: str, caller: Caller) -> Json:
        kind, _, name = path.partition("/")
        if kind == "responses":
            raise InferenceError(404, "responses are not stored: send the earlier messages as input")
        if name:
            return _describe_model(self._models.get(name, caller))
        data = [_describe_model(each) for each in self._models.list(caller)]
        ids = [each["id"] for each in data] or [None]
        return {"object": "list", "data": data, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}


class _Reply:
    """Writes one answer: JSON, a stream, or an error, in the form of the API that was called."""

    def __init__(self, send: Send, is_anthropic: bool, grace_s: float, replica: str) -> None:
        self._send = send
        self._is_anthropic = is_anthropic
        self._grace_s = grace_s
        self._replica = replica
        self._has_started, self.method = False, ""
        self.progress: RequestLifecycle | None = None
        self._headers: list[tuple[bytes, bytes]] = []

    def name_version(self, version: int | str) -> None:
        self._headers.append((b"shoal-model-version", str(version).encode()))

    async def send_part(self, message: Message) -> None:
        """Send a part of a stream, or of another replica's answer, as fast as the client takes it."""
        assert self.progress is not None
        self._has_started = True
        await self.progress.await_send(self._send(message))

    async def send_json(self, content: object, status: int = 200) -> None:
        body = msgspec.json.encode(content)
        head = [(b"content-type", JSON_TYPE), (b"content-length", b"%d" % len(body)), *self._headers]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": body})

    async def send_stream(self, frames: AsyncIterator[bytes]) -> None:
        """Send server-sent events."""
        died = self._write_last(InferenceError(503, "it has died"))
        start = {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS + self._headers}
        await self.send_part(start | {"guard": guard_stream(b"%x\r\n%b\r\n0\r\n\r\n" % (len(died), died))})
        async for frame in frames:
            await self.send_part({"type": "http.response.body", "body": frame, "more_body": True})
        await self.send_part({"type": "http.response.body", "body": b""})

    async def send_error(self, error: InferenceError) -> None:
        """Send an error, as the stream's last event if it has begun."""
        if self._has_started:
            with suppress(TimeoutError):  # a client that takes no events does not take this either
                async with asyncio.timeout(self._grace_s):
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

    def _describe(self, error: InferenceError) -> Json:
        kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        if self._is_anthropic:
            return {"type": "error", "error": {"type": kind, "message": error.message}}
        code = "context_length_exceeded" if " context length of " in error.message else error.code or None
        code = "model_not_found" if error.status == 404 and error.field == "model" else code
        described = {"message": error.message, "type": kind, "param": error.field or None, "code": code}
        return {"error": described | {"status": error.status}}  # of an error within a stream, too


def _describe_model(model: TextModel) -> Json:
    """As both APIs have it."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.created_s))
    known = {"id": model.name, "object": "model", "created": int(model.created_s), "owned_by": "shoal"}
    known |= {"type": "model", "display_name": model.name, "created_at": stamp, "max_input_tokens": model.context}
    return known | {"has_chat_template": bool(model.tokenizer.chat_template)}
