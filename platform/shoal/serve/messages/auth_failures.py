"""Who was refused for who they are (401, 403): counted where it happens, told to the audit log in few lines.

A replica counts (`Refusals`, held by `Access`) and reports its counts; the controller's audit log (`RefusalBook`) makes
lines of what is new in them. However many calls are refused, there is at most one line every `LINE_EVERY_S` for each
key, and one for all that show none or an unknown one: an attacker fills neither memory nor disk. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

LINE_EVERY_S = 60.0
MAX_CHARS = 300  # of what a caller has written


@dataclass(frozen=True)
class Refused:
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


class Refusals:
    """Of one replica, since it started. Bounded by the number of keys."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, int], Refused] = {}

    def add(self, by: str, status: int, origin: str, model: str) -> None:
        """One more."""
        before = self._counted.get((by, status))
        count = 1 if before is None else before.count + 1
        self._counted[by, status] = Refused(by, status, count, origin[:MAX_CHARS], model[:MAX_CHARS])

    def report(self) -> tuple[Refused, ...]:
        """All so far."""
        return tuple(self._counted.values())


class RefusalBook:
    """What of the replicas' counts has been told. One that is made anew has forgotten, and tells all of it again."""

    def __init__(self) -> None:
        self._told: dict[str, dict[tuple[str, int], int]] = {}
        self._told_s: dict[tuple[str, int], float] = {}

    def due(self, replicas: Iterable[tuple[str, tuple[Refused, ...]]], now_s: float) -> list[Refused]:
        """What is to be told now: the calls since it was told last, of all replicas together.

        replicas: all that there are, and what each has counted; what others had counted is forgotten
        """
        found: dict[tuple[str, int], Refused] = {}
        told: dict[str, dict[tuple[str, int], int]] = {}
        for replica, counted in replicas:
            known = told[replica] = self._told.get(replica, {})
            for each in counted:
                key = each.by, each.status
                more = each.count - known.get(key, 0)
                if more > 0 and now_s - self._told_s.get(key, -math.inf) >= LINE_EVERY_S:
                    known[key] = each.count
                    found[key] = replace(each, count=more + (found[key].count if key in found else 0))
        self._told = told
        self._told_s |= dict.fromkeys(found, now_s)
        return list(found.values())
