"""The HTTP endpoints other than inference: health, metadata, statistics, the repository, administration, episodes.

Called by `app`, which matches the path, admits the caller and reads the body. Knows no ASGI.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shoal.errors import InferenceError
from shoal.open_inference.episodes import EpisodeAnswer, EpisodeRequest
from shoal.open_inference.messages import (
    IndexedModel,
    IndexRequest,
    RepositoryRequest,
    ServerMetadata,
    Statistics,
)
from shoal.serve.http.messages import RestRequest
from shoal.serve.http.response import RestResponse, build_json_response
from shoal.serve.http.routes import RouteAction
from shoal.serve.messages.inference import Caller, ModelManagerProtocol
from shoal.serve.protocol.infer_call import resolve_version
from shoal.serve.protocol.model_metadata import EXTENSIONS, build_metadata, build_model_config
from shoal.serve.protocol.prometheus import CONTENT_TYPE

T = TypeVar("T")


@functools.cache
def openapi_document() -> bytes:
    """The OpenAPI 3.1 document, a file written by hand; a test compares it with the messages and the paths."""
    return Path(__file__).with_name("openapi.json").read_bytes()


class RestHandlers:
    """Answers requests whose path, method and caller have been checked."""

    def __init__(self, host: ModelManagerProtocol, metrics: Callable[[Caller], bytes] | None) -> None:
        self._manager, self._metrics = host, metrics

    async def handle(self, request: RestRequest, body: bytes) -> RestResponse:
        """Answer a request. Raises InferenceError."""
        caller, name = request.caller, request.target.model or ""
        match request.target.action:
            case RouteAction.LIVE:
                return build_json_response({"live": True})
            case RouteAction.READY:
                return self._answer_ready()
            case RouteAction.SERVER:
                return build_json_response(ServerMetadata("shoal", "2", EXTENSIONS))
            case RouteAction.OPENAPI:
                return RestResponse(200, openapi_document())
            case RouteAction.METRICS:
                return self._render_metrics(caller)
            case RouteAction.MODEL | RouteAction.MODEL_READY | RouteAction.MODEL_CONFIG:
                return self._describe_model(request)
            case RouteAction.STATISTICS:
                return build_json_response(Statistics(self._statistics(request)))
            case RouteAction.INDEX:
                return build_json_response(self._index(_decode_body(body, IndexRequest), caller))
            case RouteAction.LOAD:
                await self._manager.load(
                    name, _decode_body(body, RepositoryRequest).parameters or {}, request.caller_origin
                )
                return build_json_response({})
            case RouteAction.UNLOAD:
                await self._manager.unload(name, request.caller_origin)
                return build_json_response({})
            case RouteAction.STATUS:
                return build_json_response(await self._manager.status())
            case RouteAction.ROLLOUT:
                return build_json_response(
                    await self._manager.administer(_decode_body(body, dict[str, Any]), request.caller_origin)
                )
            case RouteAction.EPISODES:
                return build_json_response(await self._take_episode(_decode_body(body, EpisodeRequest), caller))
        raise AssertionError(request.target.action)

    def _answer_ready(self) -> RestResponse:
        if not self._manager.is_ready:
            raise InferenceError(503, "no model has weights yet; try again later")
        return build_json_response({"ready": True})

    async def _take_episode(self, wanted: EpisodeRequest, caller: Caller) -> EpisodeAnswer:
        if not _can_see(caller, wanted.model):
            raise InferenceError(403, f"this key is not for model {wanted.model[:200]!r}")
        return await self._manager.take_episode(wanted)

    def _render_metrics(self, caller: Caller) -> RestResponse:
        if self._metrics is None:
            raise InferenceError(404, "this endpoint has no metrics")
        return RestResponse(200, self._metrics(caller), CONTENT_TYPE)

    def _describe_model(self, request: RestRequest) -> RestResponse:
        model = self._manager.get_model(request.target.model or "")
        version = resolve_version(model, request.target.version) or model.version
        match request.target.action:
            case RouteAction.MODEL:
                return build_json_response(build_metadata(model))
            case RouteAction.MODEL_CONFIG:
                return build_json_response(build_model_config(model))
        if not version:
            raise InferenceError(503, f"model {model.name!r} has no weights yet; try again later")
        headers = [(b"shoal-model-version", b"%d" % version)]
        return RestResponse(200, msgspec.json.encode({"name": model.name, "ready": True}), headers=headers)

    def _statistics(self, request: RestRequest) -> list[Any]:
        name, text = request.target.model, request.target.version
        if name is None:
            models = [model for model in self._manager.list_models() if _can_see(request.caller, model.name)]
            return [each for model in models for each in model.statistics()]
        model = self._manager.get_model(name)
        version = resolve_version(model, text)
        return [each for each in model.statistics() if version is None or each.version == str(version)]

    def _index(self, wanted: IndexRequest, caller: Caller) -> list[IndexedModel]:
        return [
            IndexedModel(entry.name, entry.version, entry.state, entry.reason)
            for entry in self._manager.list_repository()
            if _can_see(caller, entry.name) and (entry.state == "READY" or not wanted.ready)
        ]


def _can_see(caller: Caller, model: str) -> bool:
    return caller.models is None or model in caller.models


def _decode_body(body: bytes, kind: type[T]) -> T:
    """Decode the body as `kind`; an empty body counts as an empty object. Raises InferenceError (400)."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InferenceError(400, f"not a request: {error}") from None
