"""Calls refused for a missing key or right (401, 403): counted in each replica, audited in few lines.

A replica counts (`AuthFailureCounter`, owned by `AccessControl`) and reports its counts. The controller's audit log
(`AuthFailureReporter`) writes the new ones: at most one line every `MIN_REPORT_INTERVAL_S` for each key, and one for
all calls without a known key. So an attacker fills neither memory nor disk. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

MIN_REPORT_INTERVAL_S = 60.0
MAX_CHARS = 300  # of a caller's text


@dataclass(frozen=True)
class AuthFailure:
    """Calls refused for one reason.

    by:     the name of the key; "" without a known key
    origin: the address of the last of them, as known to the ingress
    model:  the model of the last of them; "" for none
    """

    by: str
    status: int
    count: int
    origin: str = ""
    model: str = ""


class AuthFailureCounter:
    """The counts of one replica since it started. Bounded by the number of keys."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, int], AuthFailure] = {}

    def add(self, by: str, status: int, origin: str, model: str) -> None:
        before = self._counted.get((by, status))
        count = 1 if before is None else before.count + 1
        self._counted[by, status] = AuthFailure(by, status, count, origin[:MAX_CHARS], model[:MAX_CHARS])

    def snapshot(self) -> tuple[AuthFailure, ...]:
        return tuple(self._counted.values())


class AuthFailureReporter:
    """Retains the counts already reported. A new reporter has none and reports every count again."""

    def __init__(self) -> None:
        self._reported: dict[str, dict[tuple[str, int], int]] = {}
        self._reported_s: dict[tuple[str, int], float] = {}

    def take_due(self, replicas: Iterable[tuple[str, tuple[AuthFailure, ...]]], now_s: float) -> list[AuthFailure]:
        """Take the counts due now: the calls since the last report, summed over the replicas.

        replicas: each present replica with its counts; the counts of others are dropped
        """
        due: dict[tuple[str, int], AuthFailure] = {}
        reported: dict[str, dict[tuple[str, int], int]] = {}
        for replica, counted in replicas:
            known = reported[replica] = self._reported.get(replica, {})
            for each in counted:
                key = each.by, each.status
                more = each.count - known.get(key, 0)
                if more > 0 and now_s - self._reported_s.get(key, -math.inf) >= MIN_REPORT_INTERVAL_S:
                    known[key] = each.count
                    due[key] = replace(each, count=more + (due[key].count if key in due else 0))
        self._reported = reported
        self._reported_s |= dict.fromkeys(due, now_s)
        return list(due.values())
