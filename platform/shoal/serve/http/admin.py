"""What an endpoint answers over HTTP beside inferences: health, metadata, statistics, the repository, administration.

Called by `rest`, which has found the path, admitted the caller and read the body. Knows no ASGI.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from shoal.errors import InferenceError
from shoal.open_inference.messages import (
    IndexedModel,
    IndexRequest,
    RepositoryRequest,
    ServerMetadata,
    Statistics,
)
from shoal.serve.http.messages import Answer, Request, content
from shoal.serve.http.openapi import document
from shoal.serve.http.routes import Action
from shoal.serve.messages.inference import Caller, ModelHost
from shoal.serve.protocol.model_metadata import EXTENSIONS, metadata, model_config
from shoal.serve.protocol.prometheus import CONTENT_TYPE
from shoal.serve.protocol.request_options import asked_version

T = TypeVar("T")


class RestCalls:
    """Answers requests whose path, method and caller are known to be right."""

    def __init__(self, host: ModelHost, metrics: Callable[[Caller], bytes] | None) -> None:
        self._host, self._metrics = host, metrics

    async def answer(self, request: Request, body: bytes) -> Answer:
        """Raises InferenceError."""
        caller, name = request.caller, request.target.model or ""
        match request.target.action:
            case Action.LIVE:
                return content({"live": True})
            case Action.READY:
                return self._ready()
            case Action.SERVER:
                return content(ServerMetadata("shoal", "2", EXTENSIONS))
            case Action.OPENAPI:
                return content(document())
            case Action.METRICS:
                return self._scraped(caller)
            case Action.MODEL | Action.MODEL_READY | Action.MODEL_CONFIG:
                return self._described(request)
            case Action.STATISTICS:
                return content(Statistics(self._statistics(request)))
            case Action.INDEX:
                return content(self._index(_decoded(body, IndexRequest), caller))
            case Action.LOAD:
                await self._host.load(name, _decoded(body, RepositoryRequest).parameters or {}, request.by)
                return content({})
            case Action.UNLOAD:
                await self._host.unload(name, request.by)
                return content({})
            case Action.STATUS:
                return content(await self._host.status())
            case Action.ROLLOUT:
                return content(await self._host.administer(_decoded(body, dict[str, Any]), request.by))
        raise AssertionError(request.target.action)

    def _ready(self) -> Answer:
        if not self._host.ready:
            raise InferenceError(503, "not every model has weights yet; try again later")
        return content({"ready": True})

    def _scraped(self, caller: Caller) -> Answer:
        if self._metrics is None:
            raise InferenceError(404, "this endpoint has no metrics")
        return Answer(200, self._metrics(caller), CONTENT_TYPE)

    def _described(self, request: Request) -> Answer:
        model = self._host.model(request.target.model or "")
        version = asked_version(model, request.target.version) or model.version
        match request.target.action:
            case Action.MODEL:
                return content(metadata(model))
            case Action.MODEL_CONFIG:
                return content(model_config(model))
        if not version:
            raise InferenceError(503, f"model {model.name!r} has no weights yet; try again later")
        headers = [(b"shoal-model-version", b"%d" % version)]
        return Answer(200, msgspec.json.encode({"name": model.name, "ready": True}), headers=headers)

    def _statistics(self, request: Request) -> list[Any]:
        name, text = request.target.model, request.target.version
        if name is None:
            models = [model for model in self._host.models() if _may_see(request.caller, model.name)]
            return [each for model in models for each in model.statistics()]
        model = self._host.model(name)
        version = asked_version(model, text)
        return [each for each in model.statistics() if version is None or each.version == str(version)]

    def _index(self, wanted: IndexRequest, caller: Caller) -> list[IndexedModel]:
        return [
            IndexedModel(entry.name, entry.version, entry.state, entry.reason)
            for entry in self._host.repository()
            if _may_see(caller, entry.name) and (entry.state == "READY" or not wanted.ready)
        ]


def _may_see(caller: Caller, model: str) -> bool:
    return caller.models is None or model in caller.models


def _decoded(body: bytes, kind: type[T]) -> T:
    """The body as `kind`; nothing is the same as an empty object. Raises InferenceError (400)."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InferenceError(400, f"not a request: {error}") from None
