"""The Open Inference Protocol v2 over HTTP, as a bare ASGI application; `routes` lists its paths.

Owns the lifecycle of a request and the path of an inference; `admin` answers all other requests. Every error is
`{"error": "..."}`. Every answer of a model names its version in the body and in the header `shoal-model-version`.
Called by an HTTP server: the replica's, or a test's. Knows the models only through `ModelManagerProtocol`, and tensors
only through `HttpCodec`. No Ray, no torch, no framework.

    400 not a request         401 no key               403 not with this key     404 no such path, model, version
    405 method                408 body too slow        410 an episode's end      413 too large
    414, 431 path or headers  415 encoding             422 wrong tensor          429 full, or over a rate
    500 the model failed      503 no weights, closing  504 too late
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from shoal.errors import Closed, InferenceError
from shoal.open_inference.http_codec import HttpCodec
from shoal.registry.manifest import Signature
from shoal.serve.http.admin import RestHandlers
from shoal.serve.http.compression import compress_response, decompress_body
from shoal.serve.http.messages import (
    BINARY_TYPE,
    FORWARDED_FROM_HEADER,
    JSON_TYPE,
    Receive,
    RestRequest,
    RestResponse,
    Scope,
    Send,
    build_error_response,
    send_response,
)
from shoal.serve.http.routes import ADMIN_ACTIONS, UNAUTHENTICATED_ACTIONS, RouteAction, match_route
from shoal.serve.messages.inference import Caller, Disconnected, InferCall, ModelManagerProtocol, ServedModelProtocol
from shoal.serve.protocol.access import AccessControl
from shoal.serve.protocol.limits import RequestLimits
from shoal.serve.protocol.model_metadata import to_tensor_metadata
from shoal.serve.protocol.offload import LARGE_BYTES, decode_in_thread, has_large_arrays, run_in_thread
from shoal.serve.protocol.request_lifecycle import RequestLifecycle, RequestsInProgress
from shoal.serve.protocol.request_options import compute_deadline, parse_sticky, parse_track, resolve_version
from shoal.serve.spec.model_options import ModelOptions

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
        self._codecs: dict[str, tuple[Signature, ModelOptions, HttpCodec]] = {}
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
        request = RestRequest(target, headers, caller)
        if action is RouteAction.INFER:
            if self._tracer is not None:
                return await self._infer_traced(self._tracer, receive, request)
            return await self._in_progress.run(receive, self._infer, request)
        # Not watched after the body: a load is not undone because its client has gone.
        posted = target.method == "POST"
        return await self._handlers.handle(
            request, await self._in_progress.run(receive, self._body, request) if posted else b""
        )

    def _admit(self, headers: dict[bytes, bytes], model: str | None, *, administrator: bool = False) -> Caller:
        authorization, address = headers.get(b"authorization", b""), headers.get(FORWARDED_FROM_HEADER, b"")
        return self._access.admit(authorization, model, administrator=administrator, origin=address)

    async def _infer_traced(self, tracer: Tracer, receive: Receive, request: RestRequest) -> RestResponse:
        parent = request.get_header(b"traceparent"), request.get_header(b"tracestate")
        trace = tracer.start_request("POST /v2/models/{model}/infer", request.target.model or "", *parent)
        if trace is None:
            return await self._in_progress.run(receive, self._infer, request)
        with trace:
            return await self._in_progress.run(receive, self._infer, msgspec.structs.replace(request, trace=trace))

    async def _infer(self, progress: RequestLifecycle, request: RestRequest) -> RestResponse:
        arrived_s = time.monotonic()
        model = self._manager.get_model(request.target.model or "")
        version = resolve_version(model, request.target.version)
        track, sticky = (
            parse_track(request.get_header(b"shoal-track")),
            parse_sticky(request.get_header(b"shoal-sticky")),
        )
        header_length = request.get_length_header(b"inference-header-content-length")
        codec = self._codec(model)
        content = await self._body(progress, request)
        read_bytes = len(content) if header_length is None or codec.has_bytes_inputs else header_length
        wanted = (
            codec.decode(content, header_length)
            if read_bytes <= LARGE_BYTES
            else await decode_in_thread(len(content), codec.decode, content, header_length)
        )
        deadline_s = compute_deadline(
            arrived_s,
            wanted.parameters.get("timeout"),
            request.get_header(b"shoal-deadline-ms"),
            model.options.deadline_s,
        )
        call = InferCall(
            wanted.inputs,
            wanted.num_rows,
            version=version,
            deadline_s=deadline_s,
            tenant=request.caller.name,
            sticky=sticky,
            track=track,
            outputs=wanted.outputs,
            trace=request.trace,
        )
        prediction = await model.infer(call)
        if request.trace is not None:
            request.trace.record_prediction(prediction, wanted.num_rows)
        answered = wanted, prediction.version, prediction.outputs
        raw = all(wanted.binary_of.values()) if wanted.binary_of else wanted.binary
        is_large = has_large_arrays(prediction.outputs, raw=raw)
        body, parts = await run_in_thread(codec.encode, *answered) if is_large else codec.encode(*answered)
        headers = [(b"shoal-model-version", b"%d" % prediction.version)]
        if parts:
            headers.append((b"inference-header-content-length", b"%d" % len(body)))
        answer = RestResponse(200, body, BINARY_TYPE if parts else JSON_TYPE, headers, parts)
        accepted = request.headers.get(b"accept-encoding")
        return answer if accepted is None else await compress_response(answer, accepted)

    async def _body(self, progress: RequestLifecycle, request: RestRequest) -> bytes:
        body = await progress.read_body(request.get_length_header(b"content-length"))
        encoding = request.headers.get(b"content-encoding")
        return body if encoding is None else await decompress_body(body, encoding, self._limits)

    def _codec(self, model: ServedModelProtocol) -> HttpCodec:
        """The codec of a model, rebuilt when a load has changed the model's signature or options."""
        signature, options = model.signature, model.options
        known = self._codecs.get(model.name)
        if known is not None and known[0] is signature and known[1] is options:
            return known[2]
        tensors = to_tensor_metadata(signature.inputs), to_tensor_metadata(signature.outputs)
        codec = HttpCodec(model.name, *tensors, options.max_batch_size, options.batch_dim)
        self._codecs[model.name] = signature, options, codec
        return codec


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
