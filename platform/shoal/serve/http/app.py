"""The Open Inference Protocol v2 over HTTP, as a bare ASGI application; `routes` lists its paths.

Owns what every request needs: its path, its caller, the answer to an error, and sending. `inference` answers
inferences, `admin` all other requests. Every error is `{"error": "..."}`. Called by an HTTP server: the replica's, or a
test's. Knows the models only through `ModelManagerProtocol`. No Ray, no torch, no framework.

    400 not a request         401 no key               403 not with this key     404 no such path, model, version
    405 method                408 body too slow        410 an episode's end      413 too large
    414, 431 path or headers  415 encoding             422 wrong tensor          429 full, or over a rate
    500 the model failed      503 no weights, closing  504 too late
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from shoal.errors import InferenceError
from shoal.serve.http.admin import RestHandlers
from shoal.serve.http.inference import InferenceHandler, read_body
from shoal.serve.http.response import RestResponse, build_error_response
from shoal.serve.http.routes import ADMIN_ACTIONS, PEERS_PATH, UNAUTHENTICATED_ACTIONS, RouteAction, match_route
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
from shoal.serve.protocol.request_lifecycle import Receive, RequestLifecycle, RequestsInProgress, Scope, Send
from shoal.serve.protocol.request_limits import RequestLimits

INFERENCES = (RouteAction.INFER, RouteAction.ROWS, RouteAction.PEER_INFER)
MAX_JOINED_BYTES = 1 << 16  # smaller parts are joined: another message costs more than the copy


class RestApp:
    """Serves the models of `host` to the callers that `access` admits.

    metrics: builds the answer to GET /metrics, in Prometheus' text format; without it the path does not exist
    tracer:  traces inferences; without it none is traced
    root:    the path before all of its own
    """

    def __init__(
        self,
        host: ModelManagerProtocol,
        access: AccessControl,
        *,
        limits: RequestLimits | None = None,
        metrics: Callable[[Caller], bytes] | None = None,
        tracer: TracerProtocol | None = None,
        root: str = "",
    ) -> None:
        self._root, self._access = root, access
        self._limits = limits or RequestLimits()
        self._in_progress = RequestsInProgress(self._limits)
        self._inference = InferenceHandler(host, self._in_progress, tracer)
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
        root: str = scope.get("root_path", "") or self._root
        if root and path.startswith(root):
            path = path[len(root) :]
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
            return await self._inference.answer(target, headers, caller, receive)
        body = b""
        if target.method == "POST":
            # Not watched after the body: a load is not undone because its client has gone.
            with RequestLifecycle(self._in_progress, receive) as progress:
                body = await read_body(progress, headers)
        program = headers.get(b"shoal-program", b"").decode("latin-1")
        origin = format_origin(caller.name, address.decode("latin-1"), program)
        return await self._handlers.answer(target, caller, origin, body)


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
