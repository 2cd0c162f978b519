"""The Open Inference Protocol v2 over HTTP, as a bare ASGI application; `routes` lists its paths.

Owns what every request needs: its path, its caller, the answer to an error, and sending; and inferences: those of
clients, and those that replicas pass to each other. `protocol.pipeline` has what other protocols share of them, `codec`
the tensors. `admin` answers all other requests. Every answer to an inference names the version in the body and in the
header `shoal-model-version`. Every error is `{"error": "..."}`. Called by an HTTP server: the replica's, or a
test's. Knows the models only through `ModelManagerProtocol`. No Ray, no torch, no framework.

    400 not a request         401 no key               403 not with this key     404 no such path, model, version
    405 method                408 body too slow        410 an episode's end      413 too large
    414, 431 path or headers  415 encoding             422 wrong tensor          429 full, or over a rate
    500 the model failed      503 no weights, closing  504 too late

Compressing tensors costs more than it saves on most networks. So an answer is compressed, in a thread, only for a
client that accepts exactly one coding, as tritonclient does on request. Clients that list every coding by default
(curl, httpx, browsers) get plain answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from urllib.parse import unquote

from shoal.errors import InferenceError
from shoal.serve.http.admin import RestHandlers
from shoal.serve.http.codec import HttpCodec, RowCodec
from shoal.serve.http.response import RestResponse, build_error_response
from shoal.serve.http.routes import (
    ADMIN_ACTIONS,
    PEERS_PATH,
    UNAUTHENTICATED_ACTIONS,
    RouteAction,
    RouteTarget,
    match_route,
)
from shoal.serve.messages.infer_call import InferCall
from shoal.serve.messages.inference import (
    ANONYMOUS,
    Caller,
    Disconnected,
    ModelManagerProtocol,
    TracerProtocol,
    format_origin,
)
from shoal.serve.messages.model_errors import to_inference_error
from shoal.serve.protocol.access import FORWARDED_FROM_HEADER, AccessControl
from shoal.serve.protocol.pipeline import (
    BATCH_HEADER,
    GENERATION_HEADER,
    PEER_HEADER,
    TENANT_HEADER,
    ModelCodecs,
    answer_inference,
    decode_sized,
    encode_sized,
    start_trace,
)
from shoal.serve.protocol.request_lifecycle import (
    Receive,
    RequestLifecycle,
    RequestsInProgress,
    Scope,
    Send,
    read_body,
)
from shoal.serve.protocol.request_limits import WINDOW_BITS, RequestLimits, read_length

INFERENCES = (RouteAction.INFER, RouteAction.ROWS, RouteAction.PEER_INFER)
MAX_JOINED_BYTES = 1 << 16  # smaller parts are joined: another message costs more than the copy
MIN_COMPRESSED_BYTES = 1024  # smaller answers are not compressed
COMPRESSION_LEVEL = 1
TRACE_NAME, ROWS_TRACE_NAME = "POST /v2/models/{model}/infer", "POST /v2/models/{model}/rows"


class RestApp:
    """Serves the models of `host` to the callers that `access` admits.

    metrics: builds the answer to GET /metrics, in Prometheus' text format; without it the path does not exist
    tracer:  traces inferences; without it none is traced
    """

    def __init__(
        self,
        host: ModelManagerProtocol,
        access: AccessControl,
        *,
        limits: RequestLimits | None = None,
        metrics: Callable[[Caller], bytes] | None = None,
        tracer: TracerProtocol | None = None,
    ) -> None:
        self._manager = host
        self._access = access
        self._tracer = tracer
        self._limits = limits = limits or RequestLimits()
        self._in_progress = RequestsInProgress(limits)
        # A JSON number of two bytes takes eight in the form that replicas send each other.
        peer_limits = dataclasses.replace(limits, max_body_bytes=8 * limits.max_body_bytes)
        self._peers_in_progress = RequestsInProgress(peer_limits)
        self._codecs, self._row_codecs = ModelCodecs(HttpCodec), ModelCodecs(RowCodec)
        self._handlers = RestHandlers(host, metrics)
        self._statuses: Counter[int] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        assert scope["type"] == "http", scope["type"]
        try:
            answer = await self._answer(scope, receive)
        except Disconnected:
            return
        except Exception as error:  # noqa: BLE001 - a request's top: `to_inference_error` logs a bug
            answer = build_error_response(to_inference_error(error))
        if not scope["path"].startswith(PEERS_PATH):  # counted where the client has called
            self._statuses[answer.status] += 1
        await _send_response(answer, send)

    def get_status_counts(self) -> dict[int, int]:
        """The number of answers with each status."""
        return dict(self._statuses)

    async def _answer(self, scope: Scope, receive: Receive) -> RestResponse:
        path: str = scope["path"]
        self._limits.check_head(path, scope["headers"])
        headers: dict[bytes, bytes] = dict(scope["headers"])
        target = match_route(path)
        action, model = (target.action, target.model) if target else (None, None)
        key, address = headers.get(b"authorization", b""), headers.get(FORWARDED_FROM_HEADER, b"")
        caller = ANONYMOUS
        if action not in UNAUTHENTICATED_ACTIONS:
            caller = self._access.admit(key, model, administrator=action in ADMIN_ACTIONS, origin=address)
        if target is None:
            raise InferenceError(404, f"no such path: {path[:200]!r}")
        if scope["method"] != target.method:
            error = InferenceError(405, f"{scope['method']} is not allowed here, {target.method} is")
            return build_error_response(error, allowed=target.method)
        if action in INFERENCES:
            return await self._infer(target, headers, caller, receive)
        body = b""
        if target.method == "POST":
            # Not watched after the body: a load is not undone because its client has gone.
            with RequestLifecycle(self._in_progress, receive) as progress:
                body = await read_body(progress, headers)
        program = headers.get(b"shoal-program", b"").decode("latin-1")
        origin = format_origin(caller.name, address.decode("latin-1"), program)
        return await self._handlers.answer(target, caller, origin, body)

    async def _infer(
        self, target: RouteTarget, headers: dict[bytes, bytes], caller: Caller, receive: Receive
    ) -> RestResponse:
        name, is_from_peer = target.model or "", target.action is RouteAction.PEER_INFER
        in_progress = self._peers_in_progress if is_from_peer else self._in_progress
        has_rows = target.action is RouteAction.ROWS
        with (
            start_trace(self._tracer, ROWS_TRACE_NAME if has_rows else TRACE_NAME, name, headers) as trace,
            RequestLifecycle(in_progress, receive) as progress,
        ):
            arrived_s = time.monotonic()
            if is_from_peer:
                token, generation = headers.get(PEER_HEADER, b""), headers.get(GENERATION_HEADER, b"")
                model = self._manager.get_peer_model(name, token, generation)
                caller = Caller(unquote(headers.get(TENANT_HEADER, b"").decode("latin-1")))
            else:
                model = self._manager.get_model(name)
            codec: HttpCodec | RowCodec = self._row_codecs.get(model) if has_rows else self._codecs.get(model)

            async def decode() -> InferCall:
                header_length = read_length(headers, b"inference-header-content-length")
                body = await read_body(progress, headers)
                read_bytes = len(body) if header_length is None or codec.has_bytes_inputs else header_length
                return await decode_sized(read_bytes, codec.decode, body, header_length)

            call, prediction = await answer_inference(model, target.version, headers, caller, trace, decode, arrived_s)
            raw = all(call.binary_of.values()) if call.binary_of else call.binary
            answer = await encode_sized(partial(codec.encode, call), prediction, raw=raw)
            if is_from_peer:
                batch = prediction.queued_s, prediction.computed_s, prediction.batch_rows
                answer.headers.append((BATCH_HEADER, b"%.9g %.9g %d" % batch))
            accepted = headers.get(b"accept-encoding")
            return answer if accepted is None else await _compress(answer, accepted)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _send_response(answer: RestResponse, send: Send) -> None:
    body: memoryview | bytes = answer.body
    parts, length = answer.parts, len(answer.body)
    if parts:
        length += sum(map(len, parts))
        if length <= MAX_JOINED_BYTES:
            body, parts = b"".join((body, *parts)), []
    headers = [(b"content-type", answer.content_type), (b"content-length", b"%d" % length), *answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    for part in parts:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        body = part
    await send({"type": "http.response.body", "body": body})


async def _compress(answer: RestResponse, accepted: bytes) -> RestResponse:
    """Compress the answer if the client asks for it. `accepted`: the value of Accept-Encoding."""
    coding = accepted.strip().lower()
    window_bits = WINDOW_BITS.get(coding)
    if window_bits is None or len(answer.body) + sum(map(len, answer.parts)) < MIN_COMPRESSED_BYTES:
        return answer

    def compress() -> bytes:
        compressor = zlib.compressobj(COMPRESSION_LEVEL, wbits=window_bits)
        pieces = [compressor.compress(piece) for piece in (answer.body, *answer.parts)]
        return b"".join((*pieces, compressor.flush()))

    headers = [*answer.headers, (b"content-encoding", coding)]
    return RestResponse(answer.status, await asyncio.to_thread(compress), answer.content_type, headers)
