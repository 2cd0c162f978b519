"""The Open Inference Protocol v2 over HTTP, as a bare ASGI application; `routes` lists its paths.

Owns the path of a request and of an inference; `admin` answers all other requests. Every error is
`{"error": "..."}`. Every answer of a model names its version in the body and in the header `shoal-model-version`.
Called by an HTTP server: the replica's, or a test's. Knows the models only through `ModelManagerProtocol`, and tensors
only through `HttpCodec`. No Ray, no torch, no framework.

    400 not a request         401 no key               403 not with this key     404 no such path, model, version
    405 method                408 body too slow        410 an episode's end      413 too large
    414, 431 path or headers  415 encoding             422 wrong tensor          429 full, or over a rate
    500 the model failed      503 no weights, closing  504 too late
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import unquote

from shoal.errors import Closed, InferenceError
from shoal.serve.http.admin import RestHandlers
from shoal.serve.http.codec import HttpCodec
from shoal.serve.http.messages import RestRequest, compress_response, send_response
from shoal.serve.http.response import RestResponse, build_error_response, read_length
from shoal.serve.http.routes import (
    ADMIN_ACTIONS,
    PEERS_PATH,
    UNAUTHENTICATED_ACTIONS,
    RouteAction,
    RouteTarget,
    match_route,
)
from shoal.serve.messages.inference import Caller, Disconnected, ModelManagerProtocol, ServedModelProtocol
from shoal.serve.protocol.access import FORWARDED_FROM_HEADER, AccessControl
from shoal.serve.protocol.infer_call import (
    BATCH_HEADER,
    GENERATION_HEADER,
    LARGE_BYTES,
    PEER_HEADER,
    TENANT_HEADER,
    ModelCodecs,
    begin_call,
    compute_deadline,
    decode_in_thread,
    has_large_arrays,
    run_in_thread,
    start_trace,
)
from shoal.serve.protocol.request_lifecycle import (
    Receive,
    RequestLifecycle,
    RequestsInProgress,
    Scope,
    Send,
    decompress_in_thread,
)
from shoal.serve.protocol.request_limits import RequestLimits

if TYPE_CHECKING:
    from shoal.serve.protocol.tracing import Tracer

logger = logging.getLogger(__name__)

ANONYMOUS = Caller("", models=frozenset())  # for paths without a key


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
        tracer: Tracer | None = None,
        root: str = "",
    ) -> None:
        """root: the path before all of its own"""
        self._root = root
        self._manager, self._access, self._tracer = host, access, tracer
        self._limits = RequestLimits() if limits is None else limits
        self._handlers = RestHandlers(host, metrics)
        self._in_progress = RequestsInProgress(self._limits)
        # A JSON number of two bytes takes eight in the form that replicas send each other.
        peers = dataclasses.replace(self._limits, max_body_bytes=8 * self._limits.max_body_bytes)
        self._peers_in_progress = RequestsInProgress(peers)
        self._codecs = ModelCodecs(HttpCodec)
        self._statuses: Counter[int] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        assert scope["type"] == "http", scope["type"]
        try:
            answer = await self._handle(scope, receive)
        except InferenceError as error:
            answer = build_error_response(error)
        except Closed:
            answer = build_error_response(InferenceError(503, "the endpoint is closing; try again later"))
        except Disconnected:
            return
        except Exception as error:
            logger.exception("a request failed")
            answer = build_error_response(InferenceError(500, f"this request failed: {type(error).__name__}: {error}"))
        if not scope["path"].startswith(PEERS_PATH):  # counted where the client has called
            self._statuses[answer.status] += 1
        await send_response(answer, send)

    def get_status_counts(self) -> dict[int, int]:
        """The number of answers with each status."""
        return dict(self._statuses)

    async def _handle(self, scope: Scope, receive: Receive) -> RestResponse:
        path: str = scope["path"]
        root: str = scope.get("root_path", "") or self._root
        if root and path.startswith(root):
            path = path[len(root) :]
        self._limits.check_head(path, scope["headers"])
        headers: dict[bytes, bytes] = dict(scope["headers"])
        target = match_route(path)
        if target is None:
            self._admit(headers, None)
            raise InferenceError(404, f"no such path: {path[:200]!r}")
        action = target.action
        caller = ANONYMOUS
        if action not in UNAUTHENTICATED_ACTIONS:
            caller = self._admit(headers, target.model, administrator=action in ADMIN_ACTIONS)
        if scope["method"] != target.method:
            error = InferenceError(405, f"{scope['method']} is not allowed here, {target.method} is")
            return build_error_response(error, allowed=target.method)
        if action is RouteAction.INFER:
            return await self._infer(target, headers, caller, receive)
        if action is RouteAction.PEER_INFER:
            caller = Caller(unquote(headers.get(TENANT_HEADER, b"").decode("latin-1")))
            return await self._infer(target, headers, caller, receive, is_from_peer=True)
        body = b""
        if target.method == "POST":
            # Not watched after the body: a load is not undone because its client has gone.
            with RequestLifecycle(self._in_progress, receive) as progress:
                body = await self._read_body(progress, headers)
        return await self._handlers.handle(RestRequest(target, headers, caller), body)

    def _admit(self, headers: dict[bytes, bytes], model: str | None, *, administrator: bool = False) -> Caller:
        authorization, address = headers.get(b"authorization", b""), headers.get(FORWARDED_FROM_HEADER, b"")
        return self._access.admit(authorization, model, administrator=administrator, origin=address)

    async def _infer(
        self, target: RouteTarget, headers: dict[bytes, bytes], caller: Caller, receive: Receive,
        is_from_peer: bool = False,
    ) -> RestResponse:  # fmt: skip
        name = target.model or ""
        in_progress = self._peers_in_progress if is_from_peer else self._in_progress
        with (
            start_trace(self._tracer, "POST /v2/models/{model}/infer", name, headers) as trace,
            RequestLifecycle(in_progress, receive) as progress,
        ):
            arrived_s = time.monotonic()
            model = self._get_peer_model(name, headers) if is_from_peer else self._manager.get_model(name)
            call = begin_call(model, target.version, headers, caller, trace)
            header_length = read_length(headers, b"inference-header-content-length")
            codec = self._codecs.get(model)
            content = await self._read_body(progress, headers)
            read_bytes = len(content) if header_length is None or codec.has_bytes_inputs else header_length
            if read_bytes <= LARGE_BYTES:
                codec.decode(call, content, header_length)
            else:
                await decode_in_thread(len(content), codec.decode, call, content, header_length)
            call.deadline_s = compute_deadline(arrived_s, call.timeout_us, headers, model.options.deadline_s)
            prediction = await model.infer(call)
            if trace is not None:
                trace.record_prediction(prediction, call.num_rows)
            raw = all(call.binary_of.values()) if call.binary_of else call.binary
            is_large = has_large_arrays(prediction.outputs, raw=raw)
            answered = call, prediction.outputs, prediction.version
            answer = await run_in_thread(codec.encode, *answered) if is_large else codec.encode(*answered)
            if is_from_peer:
                batch = prediction.queued_s, prediction.computed_s, prediction.batch_rows
                answer.headers.append((BATCH_HEADER, b"%.9g %.9g %d" % batch))
            accepted = headers.get(b"accept-encoding")
            return answer if accepted is None else await compress_response(answer, accepted)

    def _get_peer_model(self, name: str, headers: dict[bytes, bytes]) -> ServedModelProtocol:
        token, generation = headers.get(PEER_HEADER, b""), headers.get(GENERATION_HEADER, b"")
        return self._manager.get_peer_model(name, token, generation)

    async def _read_body(self, progress: RequestLifecycle, headers: dict[bytes, bytes]) -> bytes:
        body = await progress.read_body(read_length(headers, b"content-length"))
        encoding = headers.get(b"content-encoding")
        return body if encoding is None else await decompress_in_thread(self._limits, body, encoding)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
