"""When a run gives up a worker that dies again and again. Pure: times are given. Called by `ray_workers`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from shoal.errors import ClusterError


class RestartLimit:
    """How often a worker may restart until the run goes on: one that dies at each start would do so for ever.

    most: restarts of one worker without a segment that is learnt in between
    patience_s: how long a worker may be away
    """

    def __init__(self, most: int, patience_s: float) -> None:
        self._most = most
        self._patience_s = patience_s
        self._num_learnt = 0
        self._pids: dict[str, int] = {}
        self._answered_s: dict[str, float] = {}
        self._restarts = Counter[str]()

    def check(self, now_s: float, **stats: Mapping[str, Any] | None) -> None:
        """Take what each worker says now, None for one that is away. Raises ClusterError."""
        num_learnt = (stats.get("gateway") or {}).get("segments", {}).get("consumed", 0)
        if num_learnt > self._num_learnt:
            self._num_learnt = num_learnt
            self._restarts.clear()
        for name, found in stats.items():
            if found is None:
                if now_s - self._answered_s.setdefault(name, now_s) > self._patience_s:
                    raise ClusterError(f"the {name} has not come back for {self._patience_s:g} s")
                continue
            self._answered_s[name] = now_s
            if self._pids.setdefault(name, found["pid"]) != found["pid"]:
                self._pids[name] = found["pid"]
                self._restarts[name] += 1
            if self._restarts[name] > self._most:
                raise ClusterError(f"the {name} died {self._restarts[name]} times, and nothing was learnt in between")
