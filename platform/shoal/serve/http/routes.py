"""The paths of the REST application, and the target of a request by its path.

A path of a model may name a version: GET /v2/models/{model}/versions/{version}. `openapi.json` describes the same
paths, but for that between replicas; every path has one method. Called by `app`, `admin` and exported folders. Pure.
"""

from __future__ import annotations

import functools
import re
from enum import Enum
from typing import NamedTuple

PEERS_PATH = "/shoal/v1/peers/"


class RouteAction(Enum):
    """The action of a request, with its method and path."""

    SERVER = "GET", "/v2"
    LIVE = "GET", "/v2/health/live"
    READY = "GET", "/v2/health/ready"
    MODEL = "GET", "/v2/models/{model}"
    MODEL_READY = "GET", "/v2/models/{model}/ready"
    MODEL_CONFIG = "GET", "/v2/models/{model}/config"
    MODEL_STATISTICS = "GET", "/v2/models/{model}/stats"
    INFER = "POST", "/v2/models/{model}/infer"
    ROWS = "POST", "/v2/models/{model}/rows"
    STATISTICS = "GET", "/v2/models/stats"
    INDEX = "POST", "/v2/repository/index"
    LOAD = "POST", "/v2/repository/models/{model}/load"
    UNLOAD = "POST", "/v2/repository/models/{model}/unload"
    STATUS = "GET", "/shoal/v1/status"
    ROLLOUT = "POST", "/shoal/v1/rollout"
    EPISODES = "POST", "/shoal/v1/episodes"
    METRICS = "GET", "/metrics"
    OPENAPI = "GET", "/openapi.json"
    PEER_INFER = "POST", PEERS_PATH + "{model}/infer"  # between replicas


# No key required; replicas show each other a token.
UNAUTHENTICATED_ACTIONS = frozenset({RouteAction.LIVE, RouteAction.READY, RouteAction.PEER_INFER})
ADMIN_ACTIONS = frozenset({RouteAction.LOAD, RouteAction.UNLOAD, RouteAction.STATUS, RouteAction.ROLLOUT})
_ACTIONS = {each.value[1]: each for each in RouteAction}
_MODEL_PATH = re.compile(rf"(/v2/models/|/v2/repository/models/|{PEERS_PATH})([^/]+)(?:/versions/([^/]+))?(/.*)?")


class RouteTarget(NamedTuple):
    """The target of a path. `model` and `version` are None where the path has none."""

    action: RouteAction
    method: str
    model: str | None = None
    version: str | None = None


@functools.lru_cache(maxsize=1024)
def match_route(path: str) -> RouteTarget | None:
    """Match a path; None when it is unknown."""
    path = path.removesuffix("/")
    action = _ACTIONS.get(path)
    model: str | None = None
    version: str | None = None
    if action is None and (parts := _MODEL_PATH.fullmatch(path)):
        before, model, version, after = parts.groups(default="")
        action = _ACTIONS.get(f"{before}{{model}}{after}")
        if version and action in ADMIN_ACTIONS:
            return None
    return None if action is None else RouteTarget(action, action.value[0], model, version or None)
