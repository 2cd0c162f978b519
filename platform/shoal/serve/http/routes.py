"""The paths of an endpoint, and what each of them means: pure, by table.

    GET  /v2                                    GET  /v2/models/{m}[/versions/{v}]
    GET  /v2/health/live                        GET  /v2/models/{m}[/versions/{v}]/ready
    GET  /v2/health/ready                       GET  /v2/models/{m}[/versions/{v}]/config
    GET  /v2/models/stats                       GET  /v2/models/{m}[/versions/{v}]/stats
    POST /v2/repository/index                   POST /v2/models/{m}[/versions/{v}]/infer
    POST /v2/repository/models/{m}/load         GET  /shoal/v1/status
    POST /v2/repository/models/{m}/unload       POST /shoal/v1/rollout
    GET  /metrics                               GET  /openapi.json

Called by the REST application; `openapi` describes the same table. Every path has one method.
"""

from __future__ import annotations

import functools
from enum import Enum, auto
from typing import NamedTuple


class Action(Enum):
    """What is asked for."""

    SERVER = auto()
    LIVE = auto()
    READY = auto()
    MODEL = auto()
    MODEL_READY = auto()
    MODEL_CONFIG = auto()
    INFER = auto()
    STATISTICS = auto()
    INDEX = auto()
    LOAD = auto()
    UNLOAD = auto()
    STATUS = auto()
    ROLLOUT = auto()
    METRICS = auto()
    OPENAPI = auto()


POSTED = frozenset({Action.INFER, Action.INDEX, Action.LOAD, Action.UNLOAD, Action.ROLLOUT})
OPEN = frozenset({Action.LIVE, Action.READY})  # no key is asked for
ADMINISTRATORS = frozenset({Action.LOAD, Action.UNLOAD, Action.STATUS, Action.ROLLOUT})

FIXED: dict[tuple[str, ...], Action] = {
    ("v2",): Action.SERVER,
    ("v2", "health", "live"): Action.LIVE,
    ("v2", "health", "ready"): Action.READY,
    ("v2", "models", "stats"): Action.STATISTICS,
    ("v2", "repository", "index"): Action.INDEX,
    ("shoal", "v1", "status"): Action.STATUS,
    ("shoal", "v1", "rollout"): Action.ROLLOUT,
    ("metrics",): Action.METRICS,
    ("openapi.json",): Action.OPENAPI,
}
OF_MODEL: dict[tuple[str, ...], Action] = {
    (): Action.MODEL,
    ("ready",): Action.MODEL_READY,
    ("config",): Action.MODEL_CONFIG,
    ("infer",): Action.INFER,
    ("stats",): Action.STATISTICS,
}
OF_REPOSITORY: dict[tuple[str, ...], Action] = {("load",): Action.LOAD, ("unload",): Action.UNLOAD}


class Target(NamedTuple):
    """What a path means. `model` and `version` are None where the path has none."""

    action: Action
    method: str
    model: str | None = None
    version: str | None = None


@functools.lru_cache(maxsize=1024)
def find(path: str) -> Target | None:
    """None when there is nothing at `path`."""
    segments = tuple(path.removesuffix("/").split("/")[1:])
    action = FIXED.get(segments)
    model: str | None = None
    version: str | None = None
    if action is None and len(segments) > 2 and segments[:2] == ("v2", "models"):
        model, rest = segments[2], segments[3:]
        if len(rest) > 1 and rest[0] == "versions":
            version, rest = rest[1], rest[2:]
        action = OF_MODEL.get(rest)
    elif action is None and len(segments) > 3 and segments[:3] == ("v2", "repository", "models"):
        model = segments[3]
        action = OF_REPOSITORY.get(segments[4:])
    if action is None or model == "" or version == "":
        return None
    return Target(action, "POST" if action in POSTED else "GET", model, version)
