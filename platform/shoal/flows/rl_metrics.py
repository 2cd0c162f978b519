"""The metrics of the loop, computed from the counts of the gateway and the learner for the run record.

Called by the loop's flow at each poll. Pure except for the memory of earlier counts, from which it computes rates.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

from shoal.flows.actor_learner_spec import ONLY_POLICY
from shoal.wire import DropReason

MAX_LAG_METRICS = 16  # actors with a lag metric of their own
MAX_REJECTIONS = 16  # pairs of actor and reason with a count of their own
MAX_SETTINGS = 8  # versions of the games' settings with a mean return of their own
MAX_WIN_RATES = 16  # opponents with a win rate of their own
POLLS_PER_EFOLD = 7200  # that enter the history while the run's age grows by a factor of e


class Rate:
    """The growth of a total, per second, between two counts."""

    def __init__(self) -> None:
        self._total, self._counted_at = 0.0, math.inf

    def update(self, counted_at: float, total: float) -> float:
        """The rate since the last count; 0 for the first one, and for a repeated one."""
        passed_s, grown = counted_at - self._counted_at, total - self._total
        if passed_s == 0.0:
            return 0.0
        self._total, self._counted_at = total, counted_at
        return max(0.0, grown) / passed_s if passed_s > 0.0 else 0.0


class HistorySampler:
    """Selects the polls that enter a run's history: all of the first hour, then fewer and fewer. At two polls a second
    the first hour has 7,200, the first day 30,000 and the first month 54,000.
    """

    def __init__(self, began_s: float) -> None:
        self._began_s, self._recorded_s = began_s, -math.inf

    def should_keep(self, now_s: float) -> bool:
        """Whether the poll at this moment enters it."""
        if now_s - self._recorded_s < (now_s - self._began_s) / POLLS_PER_EFOLD:
            return False
        self._recorded_s = now_s
        return True


class ActorLearnerMetrics:
    """The metrics of one incarnation of a run."""

    def __init__(self) -> None:
        self._steps, self._requests = Rate(), Rate()

    def compute(
        self, gateway: Mapping[str, Any], learner: Mapping[str, Any], requests: float, requests_at: float
    ) -> dict[str, float]:
        """Compute them from the newest stats, which may be old while a worker restarts, and all endpoint requests so
        far."""
        segments = gateway["segments"]
        lags = _get_lags(gateway)
        metrics = {
            "return/mean_100": gateway["mean_return"],
            "episodes/total": gateway["episodes"],
            "steps/total": gateway["steps"],
            "steps/per_s": self._steps.update(gateway["counted_at"], gateway["steps"]),
            "weights/version": gateway["weights_version"],
            "queue/depth": gateway["queue_depth"],
            "actors/connected": len(lags),
            "lag/max": max(lags.values(), default=math.nan),
            "lag/mean": statistics.fmean(lags.values()) if lags else math.nan,
            "segments/received": segments["received"],
            "segments/consumed": segments["consumed"],
            "segments/queued": segments["queued"],
            "segments/dropped": sum(segments["dropped"].values()),
            "segments/lost": count_lost(segments, learner),
            "endpoint/requests_per_s": self._requests.update(requests_at, requests),
            "learner/updates": learner.get("updates", 0),
            **learner.get("metrics", {}),
        }
        metrics |= {f"queue/{name}": count for name, count in gateway.get("queue_slots", {}).items()}
        metrics |= {f"drops/{reason}": count for reason, count in segments["dropped"].items()}
        metrics |= {f"episode/{name}": value for name, value in gateway.get("episode_spread", {}).items()}
        if (shown := gateway.get("demonstrations")) and shown["segments"]:
            metrics |= {f"demonstrations/{name}": count for name, count in shown.items()}
        metrics |= _summarize_opponents(gateway)
        if version := gateway.get("settings_version"):
            newest = sorted(gateway["by_settings"].items())[-MAX_SETTINGS:]
            metrics |= {f"settings/return_{each}": counts["mean_return"] for each, counts in newest}
            metrics["settings/version"] = version
        return {name: float(value) for name, value in metrics.items()}


def count_lost(segments: Mapping[str, Any], learner: Mapping[str, Any]) -> int:
    """Segments that were acknowledged and never learnt, since a gateway was lost with its disk: what no ledger accounts
    for. segments: the accounts of the gateway of now"""
    acknowledged: int = segments["dropped"].get(DropReason.GATEWAY_LOST.value, 0)
    learnt_before: int = max(0, learner.get("consumed", 0) - segments["consumed"])
    return max(0, acknowledged - learnt_before)


def combine_policies(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return those of the only policy; of several, from the metrics of each: counts and rates of all together, the
    largest lag and the newest version; `return/NAME` and the learner's under `NAME/`."""
    if ONLY_POLICY in metrics:
        return dict(metrics[ONLY_POLICY])
    result: dict[str, float] = {}
    for policy, each in metrics.items():
        for name, value in each.items():
            if name == "return/mean_100":
                result[f"return/{policy}"] = value
            elif name.partition("/")[0] in ("episodes", "steps", "queue", "segments", "drops", "demonstrations"):
                result[name] = result.get(name, 0.0) + value
            elif name in ("weights/version", "actors/connected", "lag/max"):
                known = [each for each in (result.get(name), value) if each is not None and each == each]
                result[name] = max(known, default=math.nan)
            elif name == "endpoint/requests_per_s":
                result[name] = value  # of the endpoint that all share
            elif name != "lag/mean":
                result[f"{policy}/{name}"] = value
    return result


def select_lags(gateway: Mapping[str, Any]) -> dict[str, float]:
    """The lag in versions of the first connected actors, by actor; not for curves, since actors come and go."""
    return dict(itertools.islice(_get_lags(gateway).items(), MAX_LAG_METRICS))


def select_rejections(*gateways: Mapping[str, Any]) -> dict[str, float]:
    """How many segments and messages of an actor were rejected, by "ACTOR REASON"; of many, the largest counts."""
    counts = Counter[str]()
    for actor in (each for gateway in gateways for each in gateway.get("actors", [])):
        counts.update({f"{actor['actor_id']} {reason}": count for reason, count in actor["invalid"].items()})
    return {name: float(count) for name, count in counts.most_common(MAX_REJECTIONS)}


def describe_rejections(gateway: Mapping[str, Any]) -> str:
    """Describe by reason what was dropped or rejected of all actors; "" where nothing was."""
    rejected = Counter[str]()
    for actor in gateway["actors"]:
        rejected.update(actor["invalid"])
    reasons = {**rejected, **gateway["segments"]["dropped"]}  # the ledger counts those of forgotten actors, too
    return ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())


def select_win_rates(gateways: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Select, with self-play, the share of episodes won against versions of the pool, by version; of many, some at
    equal distances and the newest. Registered ones have their names. Of several policies, by "POLICY VERSION".

    gateways: their stats, by policy
    """
    result = {}
    for policy, gateway in gateways.items():
        opponents = gateway.get("opponents", {})
        stride = -(-len(opponents) // max(2, MAX_WIN_RATES // len(gateways)))
        for version in sorted(list(opponents)[:: -stride or 1]):
            name = opponents[version].get("name", str(version))
            result[f"{policy} {name}".strip()] = float(opponents[version]["win_rate"])
    return result


def _summarize_opponents(gateway: Mapping[str, Any]) -> dict[str, float]:
    opponents = gateway.get("opponents", {}).values()
    if not opponents:
        return {}
    rates = [each["win_rate"] for each in opponents]
    return {
        "self_play/opponents": len(rates),
        "self_play/win_rate_mean": statistics.fmean(rates),
        "self_play/win_rate_min": min(rates),
        "self_play/return_mean": statistics.fmean(each["mean_return"] for each in opponents),
    }


def _get_lags(gateway: Mapping[str, Any]) -> dict[str, float]:
    return {actor["actor_id"]: float(actor["lag"]) for actor in gateway["actors"] if actor["connected"]}
