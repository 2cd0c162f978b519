"""Text below /v1/ of an endpoint: the models of a replica, and the HTTP API on top."""

from __future__ import annotations

from typing import Any

from shoal.errors import needs_extra
from shoal.extend.serve import AccessControl, ModelManager, ModelManagerProtocol, Receive, Scope, Send, TracerProtocol
from shoal.serve.protocol.request_limits import RequestLimits

# Behind /v1/, those that a client asks for whose base_url lacks it: the API says so.
PATH_PREFIXES = ("/v1/", "/chat/completions", "/completions", "/responses", "/embeddings", "/messages", "/models")


class TextApp:
    """The API, which is imported for the first request."""

    def __init__(self, manager: ModelManager, access: AccessControl, limits: RequestLimits) -> None:
        with needs_extra("language"):
            from shoal.libs.language.served.text_models import ServedTexts
        self.models = ServedTexts(manager)
        self._access, self._limits = access, limits
        self._api: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._api is None:
            from shoal.libs.language.api.app import LanguageApp

            self._api = LanguageApp(self.models, self._access, self._limits)
        await self._api(scope, receive, send)


def make_app(
    manager: ModelManagerProtocol, access: AccessControl, limits: RequestLimits, tracer: TracerProtocol | None
) -> tuple[tuple[str, ...], TextApp]:
    """The application of a replica, and the prefixes of its paths: an extension of the group `shoal.protocols`."""
    assert isinstance(manager, ModelManager)
    return PATH_PREFIXES, TextApp(manager, access, limits)
