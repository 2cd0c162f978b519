"""The Open Inference Protocol v2 over HTTP, as a bare ASGI application.

    GET  /v2                                  GET  /v2/models/{m}[/versions/{v}]
    GET  /v2/health/live                      GET  /v2/models/{m}[/versions/{v}]/ready
    GET  /v2/health/ready                     POST /v2/models/{m}[/versions/{v}]/infer
                                              GET  /v2/models/{m}/stats   (of the replica that answers)

Owns paths, status codes and headers; every error is `{"error": "..."}`, every answer names the version that made it in
its body and in the header `shoal-model-version`. Called by whatever speaks HTTP: the replica's server, or a test. Knows
tensors only through `TensorCodec`, and the model only through the `Model` protocol. No Ray, no torch, no framework.

    400 not a request   401 no token      404 unknown path, model, version   405 method   413 too large
    422 wrong tensor    429 queue is full 500 the model failed               503 no weights yet, or closing
"""

from __future__ import annotations

import hmac
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

import msgspec
import numpy as np

from shoal.errors import Closed, InferenceError
from shoal.registry.manifest import Signature
from shoal.serve.disconnects import Disconnected, DisconnectWatch
from shoal.serve.tensors import TensorCodec

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

RETRY_AFTER_S = {429: b"1", 503: b"1"}
PLATFORM = "shoal_pytorch"
OPEN_PATHS = frozenset({"/v2/health/live", "/v2/health/ready"})  # no token is asked for


class Prediction(Protocol):
    """Outputs by name, and the version of the weights that made them."""

    @property
    def outputs(self) -> dict[str, np.ndarray]: ...
    @property
    def version(self) -> int: ...


class Model(Protocol):
    """What the application serves."""

    @property
    def version(self) -> int:
        """The version that serves now; 0 before any weights."""
        ...

    async def infer(self, inputs: dict[str, np.ndarray], num_rows: int) -> Prediction:
        """Answer one request. Raises InferenceError or Closed."""
        ...


class OpenInferenceApp:
    """Serves one model under `name`. `stats()` counts what this application answered."""

    def __init__(
        self, name: str, signature: Signature, model: Model, *, max_body_bytes: int, bearer: bytes | None = None
    ) -> None:
        self.name, self.signature = name, signature
        self._model, self._codec = model, TensorCodec(signature)
        self._max_body_bytes, self._bearer = max_body_bytes, bearer
        self._disconnects = DisconnectWatch()
        self._infer_path = f"/v2/models/{name}/infer"
        self._statuses: Counter[int] = Counter()
        self._infer_count = 0
        self._infer_ns = 0
        self._last_infer_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        assert scope["type"] == "http", scope["type"]
        version = 0
        try:
            status, body, version = await self._answer(scope, receive)
        except InferenceError as error:
            status, body = error.status, _error(str(error))
        except Closed:
            status, body = 503, _error("the endpoint is closing; try again later")
        except Disconnected:
            return
        except Exception as error:
            logger.exception("a request failed")
            status, body = 500, _error(f"the model failed on this request: {type(error).__name__}: {error}")
        self._statuses[status] += 1
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if version:
            headers.append((b"shoal-model-version", b"%d" % version))
        if status != 200:
            headers += _error_headers(status, scope["path"])
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def stats(self) -> dict[str, Any]:
        """Counters since the start: requests by status, answered inferences, their time, the version that serves."""
        return {
            "version": self._model.version,
            "requests": sum(self._statuses.values()),
            "statuses": {str(status): count for status, count in sorted(self._statuses.items())},
            "infer_count": self._infer_count,
            "infer_ns": self._infer_ns,
            "last_infer_at": self._last_infer_at,
        }

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, bytes, int]:
        path: str = scope["path"]
        root: str = scope.get("root_path", "")
        if root and path.startswith(root):
            path = path[len(root) :]
        length, authorization = -1, b""
        for key, value in scope["headers"]:
            if key == b"content-length":
                length = _content_length(value)
            elif key == b"authorization":
                authorization = value
        if self._bearer is not None and path not in OPEN_PATHS and not hmac.compare_digest(authorization, self._bearer):
            raise InferenceError(401, "a bearer token is required: Authorization: Bearer TOKEN")
        if path == self._infer_path and scope["method"] == "POST":
            return await self._infer(receive, length, None)
        return await self._route(path, scope["method"], receive, length)

    async def _route(self, path: str, method: str, receive: Receive, length: int) -> tuple[int, bytes, int]:
        """Everything but the unversioned infer. `path` matches one of those in the module's docstring."""
        match path.removesuffix("/").split("/")[1:]:
            case ["v2"]:
                return self._get(method, {"name": "shoal", "version": "2", "extensions": ["statistics"]})
            case ["v2", "health", "live"]:
                return self._get(method, {"live": True})
            case ["v2", "health", "ready"]:
                return self._ready(method)
            case ["v2", "models", name, "stats"]:
                self._require(name, None)
                return self._get(method, self._statistics())
            case ["v2", "models", name, *rest] if rest[:1] != ["versions"] and len(rest) <= 1:
                version, action = None, rest
            case ["v2", "models", name, "versions", version, *action] if len(action) <= 1:
                pass
            case _:
                raise InferenceError(404, f"there is nothing at {path[:200]!r}")
        self._require(name, version)
        match action:
            case []:
                return self._get(method, self._metadata())
            case ["ready"]:
                return self._ready(method)
            case ["infer"]:
                if method != "POST":
                    raise InferenceError(405, f"{method} is not allowed here, POST is")
                return await self._infer(receive, length, version)
        raise InferenceError(404, f"there is nothing at {path[:200]!r}")

    async def _infer(self, receive: Receive, length: int, version: str | None) -> tuple[int, bytes, int]:
        body = await self._body(receive, length)
        started_ns = time.perf_counter_ns()
        request, inputs, num_rows = self._codec.decode(body)
        prediction = await self._disconnects.guard(receive, self._model.infer(inputs, num_rows))
        if version is not None and version != str(prediction.version):
            raise InferenceError(
                404, f"model {self.name!r} has moved on from version {version} to {prediction.version}"
            )
        answer = self._codec.encode(request, self.name, prediction.version, prediction.outputs)
        self._infer_count += 1
        self._infer_ns += time.perf_counter_ns() - started_ns
        self._last_infer_at = time.time()
        return 200, answer, prediction.version

    async def _body(self, receive: Receive, length: int) -> bytes:
        """The whole body. Raises InferenceError (413) as soon as it is, or claims to be, too large."""
        limit = self._max_body_bytes
        if length > limit:
            raise InferenceError(413, f"the body has {length} bytes, the limit is {limit}")
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            chunk: bytes = message.get("body", b"")
            if len(chunk) <= limit:
                return chunk
        body = bytearray()
        while True:
            if message["type"] == "http.disconnect":
                raise Disconnected
            body += message.get("body", b"")
            if len(body) > limit:
                raise InferenceError(413, f"the body is larger than the limit of {limit} bytes")
            if not message.get("more_body", False):
                return bytes(body)
            message = await receive()

    def _require(self, name: str, version: str | None) -> None:
        if name != self.name:
            raise InferenceError(404, f"there is no model {name[:200]!r}; this endpoint serves {self.name!r}")
        if version is not None and version != str(self._model.version):
            raise InferenceError(
                404, f"model {name!r} has no version {version[:40]!r}; it serves version {self._model.version}"
            )

    def _get(self, method: str, content: object) -> tuple[int, bytes, int]:
        if method != "GET":
            raise InferenceError(405, f"{method} is not allowed here, GET is")
        return 200, msgspec.json.encode(content), 0

    def _ready(self, method: str) -> tuple[int, bytes, int]:
        if self._model.version == 0 and method == "GET":
            raise InferenceError(503, "no weights have been loaded yet; try again later")
        _, body, _ = self._get(method, {"name": self.name, "ready": True})
        return 200, body, self._model.version

    def _metadata(self) -> dict[str, Any]:
        version = self._model.version
        return {
            "name": self.name,
            "versions": [str(version)] if version else [],
            "platform": PLATFORM,
            "inputs": [tensor.model_dump() for tensor in self.signature.inputs],
            "outputs": [tensor.model_dump() for tensor in self.signature.outputs],
        }

    def _statistics(self) -> dict[str, Any]:
        """The statistics extension's shape, of this replica."""
        failed = sum(count for status, count in self._statuses.items() if status >= 400)
        model = {
            "name": self.name,
            "version": str(self._model.version),
            "last_inference": int(self._last_infer_at * 1000),
            "inference_count": self._infer_count,
            "inference_stats": {
                "success": {"count": self._infer_count, "ns": self._infer_ns},
                "fail": {"count": failed, "ns": 0},
            },
        }
        return {"model_stats": [model]}


def _error(message: str) -> bytes:
    return msgspec.json.encode({"error": message})


def _error_headers(status: int, path: str) -> Headers:
    if status in RETRY_AFTER_S:
        return [(b"retry-after", RETRY_AFTER_S[status])]
    if status == 401:
        return [(b"www-authenticate", b'Bearer realm="shoal"')]
    if status == 405:
        return [(b"allow", b"POST" if path.endswith("/infer") else b"GET")]
    if status == 413:
        return [(b"connection", b"close")]  # the rest of the body is not read
    return []


def _content_length(value: bytes) -> int:
    if not value.isdigit():
        raise InferenceError(400, "Content-Length is not a number")
    return int(value)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
