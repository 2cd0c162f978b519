"""The order in which waiting runs start, and why one of them waits: pure functions of the entries of a cluster's runs.

Called by `admission`, which writes the entries and does what these functions decide. Knows no clock and no Ray.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

MAX_HOLDERS_SHOWN = 3
_STEP = 1e-9  # what a sum of fractions may lack
Resources = Mapping[str, float]  # amounts by name: {"CPU": 4.0}


class AdmissionState(StrEnum):
    """WAITING -> STARTING -> RUNNING. The workers of a STARTING run have no places yet: what it needs is taken."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"


@dataclass(frozen=True)
class QueuedRun:
    """The entry of one run.

    driver:   Ray's id of the job of its driver: an entry ends with it
    since_s:  when it first asked, Unix time
    needs:    of all its workers together
    """

    run_id: str
    driver: str
    owner: str
    priority: int
    since_s: float
    needs: dict[str, float]
    state: AdmissionState = AdmissionState.WAITING


def order_waiting(runs: Sequence[QueuedRun]) -> list[QueuedRun]:
    """The waiting runs in the order of their starts: the highest priority first, then the owner with the fewest runs
    that have started or are ahead, then the oldest."""
    ahead = Counter(each.owner for each in runs if each.state is not AdmissionState.WAITING)
    waiting, ordered = [each for each in runs if each.state is AdmissionState.WAITING], list[QueuedRun]()
    while waiting:
        following = min(waiting, key=lambda each: (-each.priority, ahead[each.owner], each.since_s, each.run_id))
        waiting.remove(following)
        ordered.append(following)
        ahead[following.owner] += 1
    return ordered


def list_ahead(own: QueuedRun, runs: Sequence[QueuedRun]) -> list[QueuedRun]:
    """The runs that get what `own` needs before it: those that start, and those that wait ahead of it."""
    others = [each for each in runs if each.run_id != own.run_id]
    waiting = order_waiting([replace(own, state=AdmissionState.WAITING), *others])
    before = waiting[: next(index for index, each in enumerate(waiting) if each.run_id == own.run_id)]
    starting = [each for each in others if each.state is AdmissionState.STARTING]
    return [each for each in (*starting, *before) if any(each.needs.get(name, 0.0) for name in own.needs)]


def has_capacity(own: QueuedRun, runs: Sequence[QueuedRun], free: Resources) -> bool:
    """Whether what is free suffices for `own` and all that are ahead of it. Nothing overtakes: a large run would wait
    without end behind small ones."""
    ahead = list_ahead(own, runs)
    return all(
        sum((each.needs.get(name, 0.0) for each in ahead), amount) <= free.get(name, 0.0) + _STEP
        for name, amount in own.needs.items()
    )


def describe_shortage(own: QueuedRun, runs: Sequence[QueuedRun], free: Resources, total: Resources) -> str:
    """What is free of what `own` needs, who has the rest, and its position."""
    amounts = [f"{_round(free.get(name, 0.0))} of {total.get(name, 0.0):g} {name}s free" for name in own.needs]
    started = [each for each in runs if each.state is not AdmissionState.WAITING and each.run_id != own.run_id]
    holders = [each for each in started if any(each.needs.get(name) for name in own.needs)]
    parts = [f"{each.run_id} ({each.owner}) has {format_needs(each.needs)}" for each in holders[:MAX_HOLDERS_SHOWN]]
    more = len(holders) - MAX_HOLDERS_SHOWN
    others = {
        name: total.get(name, 0.0) - free.get(name, 0.0) - sum(each.needs.get(name, 0.0) for each in holders)
        for name in own.needs
    }
    parts += [f"{more} more runs have others"] * (more > 0)
    parts += [f"other work has {format_needs(others)}"] * any(amount > _STEP for amount in others.values())
    waiting = [each.run_id for each in order_waiting(runs)]
    if len(waiting) > 1 and own.run_id in waiting:
        position = waiting.index(own.run_id)
        before = f"after {waiting[position - 1]}, " if position else ""
        parts.append(f"{before}{position + 1} of {len(waiting)} in the queue")
    return "; ".join([", ".join(amounts), *parts])


def format_needs(needs: Resources) -> str:
    """4 GPU, 2.5 CPU."""
    return ", ".join(f"{_round(amount)} {name}" for name, amount in sorted(needs.items()) if amount > _STEP)


def _round(amount: float) -> str:
    return f"{round(max(amount, 0.0), 4):g}"
