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
from shoal.open_inference.episodes import EpisodeRequest
from shoal.open_inference.messages import IndexRequest, RepositoryRequest, ServerMetadata, Statistics
from shoal.serve.http.response import RestResponse, build_json_response
from shoal.serve.http.routes import RouteAction, RouteTarget
from shoal.serve.messages.inference import Caller, ModelManagerProtocol
from shoal.serve.protocol.model_metadata import (
    EXTENSIONS,
    build_metadata,
    build_model_config,
    list_index,
    list_statistics,
)
from shoal.serve.protocol.pipeline import resolve_version
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

    async def answer(self, target: RouteTarget, caller: Caller, origin: str, body: bytes) -> RestResponse:
        """Answer a request. Raises InferenceError.

        origin: the caller and its address as known to the ingress, for the record of changes
        """
        match target.action:
            case RouteAction.LIVE:
                return build_json_response({"live": True})
            case RouteAction.READY:
                if not self._manager.is_ready:
                    raise InferenceError(503, "no model has weights yet; try again later")
                return build_json_response({"ready": True})
            case RouteAction.SERVER:
                return build_json_response(ServerMetadata("shoal", "2", EXTENSIONS))
            case RouteAction.OPENAPI:
                return RestResponse(200, openapi_document())
            case RouteAction.METRICS:
                if self._metrics is None:
                    raise InferenceError(404, "this endpoint has no metrics")
                return RestResponse(200, self._metrics(caller), CONTENT_TYPE)
            case RouteAction.MODEL | RouteAction.MODEL_READY | RouteAction.MODEL_CONFIG:
                return self._describe_model(target)
            case RouteAction.STATISTICS | RouteAction.MODEL_STATISTICS:
                statistics = list_statistics(self._manager, caller, target.model, target.version)
                return build_json_response(Statistics(statistics))
            case RouteAction.INDEX:
                is_ready = _decode_body(body, IndexRequest).ready
                return build_json_response(list_index(self._manager, caller, is_ready))
        return build_json_response(await self._act(target, caller, origin, body))

    async def _act(self, target: RouteTarget, caller: Caller, origin: str, body: bytes) -> object:
        """What needs the controller, or the gateway of a run."""
        match target.action:
            case RouteAction.LOAD:
                parameters = _decode_body(body, RepositoryRequest).parameters or {}
                await self._manager.controller.load(target.model or "", parameters, origin)
                return {}
            case RouteAction.UNLOAD:
                await self._manager.controller.unload(target.model or "", origin)
                return {}
            case RouteAction.STATUS:
                return await self._manager.controller.status()
            case RouteAction.ROLLOUT:
                return await self._manager.controller.administer(_decode_body(body, dict[str, Any]), origin)
            case RouteAction.EPISODES:
                step = _decode_body(body, EpisodeRequest)
                if not caller.can_see(step.model):
                    raise InferenceError(403, f"this key is not for model {step.model[:200]!r}")
                return await self._manager.take_episode(step)
        raise AssertionError(target.action)

    def _describe_model(self, target: RouteTarget) -> RestResponse:
        model = self._manager.get_model(target.model or "")
        version = resolve_version(model, target.version) or model.version
        match target.action:
            case RouteAction.MODEL:
                return build_json_response(build_metadata(model))
            case RouteAction.MODEL_CONFIG:
                return build_json_response(build_model_config(model))
        if not version:
            raise InferenceError(503, f"model {model.name!r} has no weights yet; try again later")
        headers = [(b"shoal-model-version", b"%d" % version)]
        return RestResponse(200, msgspec.json.encode({"name": model.name, "ready": True}), headers=headers)


def _decode_body(body: bytes, kind: type[T]) -> T:
    """Decode the body as `kind`; an empty body counts as an empty object. Raises InferenceError (400)."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InferenceError(400, f"not a request: {error}") from None
