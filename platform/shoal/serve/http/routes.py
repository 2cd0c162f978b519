"""The paths of the REST application, and the target of a request by its path.

    GET  /v2                                    GET  /v2/models/{m}[/versions/{v}]
    GET  /v2/health/live                        GET  /v2/models/{m}[/versions/{v}]/ready
    GET  /v2/health/ready                       GET  /v2/models/{m}[/versions/{v}]/config
    GET  /v2/models/stats                       GET  /v2/models/{m}[/versions/{v}]/stats
    POST /v2/repository/index                   POST /v2/models/{m}[/versions/{v}]/infer
    POST /v2/repository/models/{m}/load         GET  /shoal/v1/status
    POST /v2/repository/models/{m}/unload       POST /shoal/v1/rollout
    POST /shoal/v1/episodes                     POST /v2/models/{m}[/versions/{v}]/rows
    GET  /openapi.json                          GET  /metrics

Between replicas: POST /shoal/v1/peers/{m}[/versions/{v}]/infer

Called by `app`, `admin` and exported folders. `openapi.json` describes the same table; every path has one method. Pure.
"""

from __future__ import annotations

import functools
from enum import Enum, auto
from typing import NamedTuple


class RouteAction(Enum):
    """The action of a request."""

    SERVER = auto()
    LIVE = auto()
    READY = auto()
    MODEL = auto()
    MODEL_READY = auto()
    MODEL_CONFIG = auto()
    INFER = auto()
    ROWS = auto()
    STATISTICS = auto()
    INDEX = auto()
    LOAD = auto()
    UNLOAD = auto()
    STATUS = auto()
    ROLLOUT = auto()
    EPISODES = auto()
    METRICS = auto()
    OPENAPI = auto()
    PEER_INFER = auto()


POST_ACTIONS = frozenset(
    {
        *(RouteAction.INFER, RouteAction.ROWS, RouteAction.INDEX, RouteAction.LOAD, RouteAction.UNLOAD),
        *(RouteAction.ROLLOUT, RouteAction.EPISODES, RouteAction.PEER_INFER),
    }
)
# No key required; replicas show each other a token.
UNAUTHENTICATED_ACTIONS = frozenset({RouteAction.LIVE, RouteAction.READY, RouteAction.PEER_INFER})
ADMIN_ACTIONS = frozenset({RouteAction.LOAD, RouteAction.UNLOAD, RouteAction.STATUS, RouteAction.ROLLOUT})

FIXED_ROUTES: dict[tuple[str, ...], RouteAction] = {
    ("v2",): RouteAction.SERVER,
    ("v2", "health", "live"): RouteAction.LIVE,
    ("v2", "health", "ready"): RouteAction.READY,
    ("v2", "models", "stats"): RouteAction.STATISTICS,
    ("v2", "repository", "index"): RouteAction.INDEX,
    ("shoal", "v1", "status"): RouteAction.STATUS,
    ("shoal", "v1", "rollout"): RouteAction.ROLLOUT,
    ("shoal", "v1", "episodes"): RouteAction.EPISODES,
    ("metrics",): RouteAction.METRICS,
    ("openapi.json",): RouteAction.OPENAPI,
}
MODEL_ROUTES: dict[tuple[str, ...], RouteAction] = {
    (): RouteAction.MODEL,
    ("ready",): RouteAction.MODEL_READY,
    ("config",): RouteAction.MODEL_CONFIG,
    ("infer",): RouteAction.INFER,
    ("rows",): RouteAction.ROWS,
    ("stats",): RouteAction.STATISTICS,
}
PEERS_PATH = "/shoal/v1/peers/"
PEER_PATH = PEERS_PATH + "{model}/infer"
REPOSITORY_ROUTES: dict[tuple[str, ...], RouteAction] = {("load",): RouteAction.LOAD, ("unload",): RouteAction.UNLOAD}


class RouteTarget(NamedTuple):
    """The target of a path. `model` and `version` are None where the path has none."""

    action: RouteAction
    method: str
    model: str | None = None
    version: str | None = None


@functools.lru_cache(maxsize=1024)
def match_route(path: str) -> RouteTarget | None:
    """Match a path; None when it is unknown."""
    segments = tuple(path.removesuffix("/").split("/")[1:])
    action = FIXED_ROUTES.get(segments)
    model: str | None = None
    version: str | None = None
    if action is None and len(segments) > 2 and segments[:2] == ("v2", "models"):
        model, rest = segments[2], segments[3:]
        if len(rest) > 1 and rest[0] == "versions":
            version, rest = rest[1], rest[2:]
        action = MODEL_ROUTES.get(rest)
    elif action is None and len(segments) > 3 and segments[:3] == ("v2", "repository", "models"):
        model = segments[3]
        action = REPOSITORY_ROUTES.get(segments[4:])
    elif action is None and len(segments) in (5, 7) and segments[:3] == ("shoal", "v1", "peers"):
        model, rest = segments[3], segments[4:]
        if len(rest) == 3 and rest[0] == "versions":
            version, rest = rest[1], rest[2:]
        action = RouteAction.PEER_INFER if rest == ("infer",) else None
    if action is None or model == "" or version == "":
        return None
    return RouteTarget(action, "POST" if action in POST_ACTIONS else "GET", model, version)
