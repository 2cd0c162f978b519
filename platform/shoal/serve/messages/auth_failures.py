"""Calls that were refused for want of a key or a right (401, 403): counted in each replica, audited in few lines.

A replica counts (`AuthFailureCounter`, held by `AccessControl`) and reports its counts; the controller's audit log
(`AuthFailureReporter`) writes what is new in them. However many calls are refused, it writes at most one line every
`LINE_EVERY_S` for each key, and one for all calls without a known key: an attacker fills neither memory nor disk. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

MIN_REPORT_INTERVAL_S = 60.0
MAX_CHARS = 300  # of what a caller has written


@dataclass(frozen=True)
class AuthFailure:
    """Calls that were refused for one reason.

    by:     the name of the key; "" when none was shown that is known
    origin: where the last of them came from, as far as the ingress knows
    model:  which one the last of them was for; "" when it was for none
    """

    by: str
    status: int
    count: int
    origin: str = ""
    model: str = ""


class AuthFailureCounter:
    """Of one replica, since it started. Bounded by the number of keys."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, int], AuthFailure] = {}

    def add(self, by: str, status: int, origin: str, model: str) -> None:
        """One more."""
        before = self._counted.get((by, status))
        count = 1 if before is None else before.count + 1
        self._counted[by, status] = AuthFailure(by, status, count, origin[:MAX_CHARS], model[:MAX_CHARS])

    def snapshot(self) -> tuple[AuthFailure, ...]:
        """All so far."""
        return tuple(self._counted.values())


class AuthFailureReporter:
    """What of the replicas' counts has been told. One that is made anew has forgotten, and tells all of it again."""

    def __init__(self) -> None:
        self._reported: dict[str, dict[tuple[str, int], int]] = {}
        self._reported_s: dict[tuple[str, int], float] = {}

    def take_due(self, replicas: Iterable[tuple[str, tuple[AuthFailure, ...]]], now_s: float) -> list[AuthFailure]:
        """What is to be told now: the calls since it was told last, of all replicas together.

        replicas: all that there are, and what each has counted; what others had counted is forgotten
        """
        found: dict[tuple[str, int], AuthFailure] = {}
        told: dict[str, dict[tuple[str, int], int]] = {}
        for replica, counted in replicas:
            known = told[replica] = self._reported.get(replica, {})
            for each in counted:
                key = each.by, each.status
                more = each.count - known.get(key, 0)
                if more > 0 and now_s - self._reported_s.get(key, -math.inf) >= MIN_REPORT_INTERVAL_S:
                    known[key] = each.count
                    found[key] = replace(each, count=more + (found[key].count if key in found else 0))
        self._reported = told
        self._reported_s |= dict.fromkeys(found, now_s)
        return list(found.values())
