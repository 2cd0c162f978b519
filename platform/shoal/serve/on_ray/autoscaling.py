"""The autoscaling policy as Ray Serve's controller calls it: the shell around `scaling.ScalePolicy`.

Serve makes one object for a deployment and calls it twenty times a second, in its controller; a decision is made once a
second. Serve's own delays are off (`options`): its wrapper adds the bounds, and starts a replica for a request that
waits where there is none.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from ray.serve.config import AutoscalingContext

from shoal.atomic_file import replace_synced
from shoal.cluster.ingress.serve_environment import write_sleep_mark
from shoal.serve.scaling import Budget, EndpointLoad, ScalePolicy, decode
from shoal.serve.spec.scale import ScaleSpec

DECIDE_EVERY_S = 1.0
SAVE_EVERY_S = 60.0
MAX_GAP_S = 600.0  # without a save for longer, the endpoint was not deployed
logger = logging.getLogger("ray.serve")


class EndpointAutoscaler:
    """scale, objective_s: of the endpoint. spent_file: where a budget's account outlives this process."""

    def __init__(self, scale: dict[str, Any], objective_s: float, spent_file: str) -> None:
        spec = ScaleSpec.parse(scale)
        self._spec = spec
        self._objective_s = objective_s
        self._spent_file = Path(spent_file)
        self._policy: ScalePolicy | None = None
        self._decided_s = self._saved_s = -math.inf
        self._replicas, self._is_asleep = -1, False
        self._mark = (-1.0, 0.0, 0.0)  # what the ingress has been told: see `write_sleep_mark`

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        now_s = float(ctx.current_time or 0.0)
        was_asleep, self._is_asleep = self._is_asleep, ctx.target_num_replicas == 0
        if 0 <= now_s - self._decided_s < DECIDE_EVERY_S and was_asleep == self._is_asleep:
            return self._replicas, {}
        if self._policy is None or now_s < self._decided_s:  # the first call, or a clock that was put back
            budget = self._load_budget(now_s) if self._spec.budget else None
            self._policy, self._saved_s = ScalePolicy(self._spec, self._objective_s, budget), now_s
        self._decided_s = now_s
        decision = self._policy.decide(_read_load(ctx, now_s))
        if decision.replicas != self._replicas:
            what = f"{decision.replicas} replicas ({decision.reason}, {decision.requests_per_s:.1f} requests/s)"
            logger.info("%s: %s", ctx.app_name, what)
        self._replicas = decision.replicas
        self._inform_ingress(self._policy.budget, ctx, now_s)
        return decision.replicas, {}

    def _inform_ingress(self, budget: Budget | None, ctx: AutoscalingContext, now_s: float) -> None:
        """Save the account, and tell the ingress what it needs while the endpoint sleeps: until when it refuses what
        would wake it, since Serve starts a replica without asking this policy; and how long a start takes."""
        if budget is not None and now_s - self._saved_s >= SAVE_EVERY_S:
            self._saved_s = now_s
            spent = {"period": budget.period, "charged_s": budget.charged_s, "spent_s": budget.spent_s}
            self._spent_file.parent.mkdir(parents=True, exist_ok=True)
            replace_synced(self._spent_file, json.dumps(spent).encode())
        until_s = 0.0 if budget is None else budget.find_rejection_end(now_s)  # 0: also of a budget that was removed
        _, start_s, began_at_s = self._mark
        is_starting = ctx.target_num_replicas > 0 and not ctx.current_num_replicas
        if not is_starting and began_at_s and ctx.current_num_replicas:
            start_s = now_s - began_at_s
        mark = until_s, start_s, (began_at_s or now_s) if is_starting else 0.0
        if mark != self._mark and write_sleep_mark(os.environ, ctx.app_name, *mark):
            self._mark = mark

    def _load_budget(self, now_s: float) -> Budget:
        """The account of this day or month, charged until it was last kept, or until now after a short gap."""
        if not self._spent_file.is_file():
            return Budget(self._spec)
        spent = json.loads(self._spent_file.read_text())
        budget = Budget(self._spec, spent["charged_s"], spent["spent_s"])
        if spent["period"] != budget.period:
            return Budget(self._spec)
        if not 0 <= now_s - spent["charged_s"] <= MAX_GAP_S:
            budget.spend(0, now_s)
        return budget


def _read_load(ctx: AutoscalingContext, now_s: float) -> EndpointLoad:
    """The newest samples: Serve's own aggregate is the mean of its window, which lags."""
    numbers: dict[str, dict[str, float]] = defaultdict(dict)
    for name, by_replica in (ctx.raw_metrics or {}).items():
        for replica, series in by_replica.items():
            if series:
                numbers[replica.unique_id][name] = series[-1].value
    replicas = {name: decode(each) for name, each in numbers.items() if "requests" in each}
    running = ctx.current_num_replicas
    unrouted = 0.0 if running else float(ctx.total_queued_requests)
    return EndpointLoad(now_s, replicas, running, ctx.target_num_replicas, unrouted)
