"""Calls of Ray actors that may be slow, restarting or gone: which errors mean that, and whether to ask again.

Called by the shells around Ray. Each of them says how long it waits and which of its own errors a failure becomes.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, ObjectLostError, RayActorError

NAMESPACE = "shoal"  # of every actor with a name
CALL_TIMEOUT_S = 10.0
RETRY_S = 0.2
AWAY = (RayActorError, GetTimeoutError, ObjectLostError)  # dead, restarting or unreachable
UNREACHABLE = (GetTimeoutError, ActorUnavailableError)  # slow or out of reach: the actor may have got the call
Errors = tuple[type[Exception], ...]


def call_or_none(
    method: Any, *args: object, timeout_s: float = CALL_TIMEOUT_S, away: Errors = UNREACHABLE, pause_s: float = 0.0
) -> Any:
    """The actor's answer; None after an error in `away`.

    pause_s: how long to wait after such an error: a dead actor answers at once, and the caller must not spin
    """
    try:
        return ray.get(method.remote(*args), timeout=timeout_s)
    except away:
        time.sleep(pause_s)
        return None


def call_until_answered(
    method: Any, *args: object, patience_s: float, timeout_s: float | None = CALL_TIMEOUT_S, away: Errors = AWAY
) -> Any:
    """The actor's answer; asks again after an error in `away`, and raises it once `patience_s` are over.

    timeout_s: of one call; None for all that is left of `patience_s`
    """
    deadline = time.monotonic() + patience_s
    while True:
        limit_s = max(RETRY_S, deadline - time.monotonic()) if timeout_s is None else timeout_s
        try:
            return ray.get(method.remote(*args), timeout=limit_s)
        except away:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)
