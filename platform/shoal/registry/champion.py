"""Which version is the champion: the best one by a metric, where versions can be compared.

A pure function of manifests, which the registry applies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from shoal.registry.manifest import Manifest

CHAMPION = "champion"
_LEARNT_FROM = ("train", "test")  # parts of the data that no such metric is measured on


class Criterion(NamedTuple):
    """The metric that a Task or a run names, among those of a version."""

    metric: str
    is_higher_better: bool


def judge_champion(
    new: Manifest, now: Manifest | None, criterion: Criterion | None, scores: Mapping[int, float] = MappingProxyType({})
) -> tuple[bool, str]:
    """Whether a new version becomes the champion in place of the present one, and the reason in a line.

    Two versions are comparable if both have the metric, measured on the same data: the fingerprints of all parts but
    those for training and test agree. A better one becomes the champion; an equal one, and one that cannot be compared,
    does not. What is registered by hand, without a criterion, does.

    scores: the metric by version, of champions that were measured again on the data of the new one
    """
    if now is None:
        return True, f"champion is {new.version}, the first"
    if criterion is None and new.run_id is None:
        return True, f"champion is {new.version} now, which no run has made"
    if (reason := _find_obstacle(new, now, criterion, scores)) or criterion is None:
        move = f"`shoal models promote {new.name}@{new.version}` makes it the champion"
        return False, f"champion stays {now.version}: {reason}; {move}"
    metric, sign = criterion.metric, 1.0 if criterion.is_higher_better else -1.0
    ours, theirs = new.metrics[metric], scores.get(now.version, now.metrics.get(metric, math.nan))
    is_better = sign * ours > sign * theirs or (math.isnan(theirs) and not math.isnan(ours))
    head = f"champion is {new.version} now" if is_better else f"champion stays {now.version}"
    first, second = (ours, theirs) if is_better else (theirs, ours)
    relation = "=" if first == second else ">" if first > second else "<" if first < second else "beside"
    on = f" on the validation data of {new.version}" if now.version in scores else ""
    return is_better, f"{head}: {metric} {' '.join(_tell_apart(first, relation, second))}{on}"


def _find_obstacle(new: Manifest, now: Manifest, criterion: Criterion | None, scores: Mapping[int, float]) -> str:
    """Why the two cannot be compared; "" where they can."""
    if criterion is None:
        return f"no metric compares {new.version} with it"
    measured = [new] if now.version in scores else [new, now]
    if missing := [each.version for each in measured if criterion.metric not in each.metrics]:
        return f"{missing[0]} has no {criterion.metric} to compare"
    if now.version not in scores and not is_same_data(new.data, now.data):
        said = _tell_apart(new.metrics[criterion.metric], "is of other data than", now.metrics[criterion.metric])
        return " ".join((criterion.metric, *said))
    return ""


def is_same_data(ours: Mapping[str, str], theirs: Mapping[str, str]) -> bool:
    """Whether metrics of two versions were measured on the same data, by its fingerprints."""
    first, second = ({part: each for part, each in data.items() if part not in _LEARNT_FROM} for data in (ours, theirs))
    return first == second


def _tell_apart(first: float, relation: str, second: float) -> tuple[str, str, str]:
    """Both numbers with as many digits as they differ by."""
    for digits in range(3, 18):
        shown = f"{first:.{digits}g}", f"{second:.{digits}g}"
        if shown[0] != shown[1] or relation == "=":
            break
    return shown[0], relation, shown[1]
