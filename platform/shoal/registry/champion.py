"""Which version is the champion: the best one by a metric, where versions can be compared.

A pure function of manifests, which the registry applies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from shoal.registry.manifest import Manifest

CHAMPION = "champion"
_LEARNT_FROM = ("train", "test")  # parts of the data that no such metric is measured on


class Criterion(NamedTuple):
    """The metric that a Task or a run names, among those of a version."""

    metric: str
    is_higher_better: bool


def judge_champion(new: Manifest, now: Manifest | None, criterion: Criterion | None) -> tuple[bool, str]:
    """Whether a new version becomes the champion in place of the present one, and the reason in a line.

    Two versions are comparable if both have the metric, measured on the same data: the fingerprints of all parts but
    those for training and test agree. A better one becomes the champion, an equal one does not; of those that cannot be
    compared the newer one does.
    """
    if now is None:
        return True, f"champion is {new.version}, the first"
    reason = _find_obstacle(new, now, criterion)
    if reason or criterion is None:
        return True, f"champion is {new.version} now, the newest: {reason}"
    metric, sign = criterion.metric, 1.0 if criterion.is_higher_better else -1.0
    ours, theirs = new.metrics[metric], now.metrics[metric]
    is_better = sign * ours > sign * theirs or (math.isnan(theirs) and not math.isnan(ours))
    head = f"champion is {new.version} now" if is_better else f"champion stays {now.version}"
    first, second = (ours, theirs) if is_better else (theirs, ours)
    relation = "=" if first == second else ">" if first > second else "<" if first < second else "beside"
    return is_better, f"{head}: {metric} {' '.join(_tell_apart(first, relation, second))}"


def _find_obstacle(new: Manifest, now: Manifest, criterion: Criterion | None) -> str:
    """Why the two cannot be compared; "" where they can."""
    if criterion is None:
        return f"no metric compares it with {now.version}"
    if missing := [each.version for each in (new, now) if criterion.metric not in each.metrics]:
        return f"{missing[0]} has no {criterion.metric} to compare"
    if _select_measured(new.data) != _select_measured(now.data):
        ours, theirs = new.metrics[criterion.metric], now.metrics[criterion.metric]
        is_worse = (ours < theirs) == criterion.is_higher_better and ours != theirs
        end = f"; `shoal models rollback {new.name}` takes {now.version} again" if is_worse else ""
        said = _tell_apart(ours, "is of other data than", theirs)
        return " ".join((criterion.metric, *said, f"of {now.version}{end}"))
    return ""


def _select_measured(data: Mapping[str, str]) -> dict[str, str]:
    return {part: fingerprint for part, fingerprint in data.items() if part not in _LEARNT_FROM}


def _tell_apart(first: float, relation: str, second: float) -> tuple[str, str, str]:
    """Both numbers with as many digits as they differ by."""
    for digits in range(3, 18):
        shown = f"{first:.{digits}g}", f"{second:.{digits}g}"
        if shown[0] != shown[1] or relation == "=":
            break
    return shown[0], relation, shown[1]
