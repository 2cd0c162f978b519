"""Decides which replica loads a model, and what it drops for it: pure functions of sizes and times.

Called by `assignments`, which acts. A loaded model is worth what its next request would wait without it, by the rate at
which it is used: its load time over its idle time. The models that are dropped are those of the least worth for their
bytes. One that another replica has too is worth a forward alone.

A model is not dropped while it is used, nor in the first `HOLD_LOADS` load times: two models that take turns for one
capacity cost a fifth of the time in loads, never all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HOLD_LOADS = 4.0
MIN_HOLD_S = 0.25
FORWARD_S = 0.001  # a request's detour to the replica that has its model
MIN_IDLE_S = 0.001
HOT_WAIT_RATIO = 2.0  # of a model's predicted wait to its shortest forward: then another replica loads it, too


@dataclass(frozen=True)
class ResidentModel:
    """A model on a replica, or on its way there.

    idle_s:    since its last request
    age_s:     since the replica was to load it
    is_in_use: a request waits for it, or its version is being changed
    has_copy:  another replica has it, too
    """

    size_bytes: int
    load_s: float = 0.0
    idle_s: float = 0.0
    age_s: float = math.inf
    is_in_use: bool = False
    has_copy: bool = False

    @property
    def hold_s(self) -> float:
        """How long it stays at least, from now on; infinite while it is used."""
        return math.inf if self.is_in_use else max(0.0, MIN_HOLD_S, HOLD_LOADS * self.load_s) - self.age_s

    @property
    def loss(self) -> float:
        """The expected seconds of waiting for each second without it."""
        return (FORWARD_S if self.has_copy else max(self.load_s, FORWARD_S)) / max(self.idle_s, MIN_IDLE_S)


@dataclass(frozen=True)
class ReplicaMemory:
    """The models of a replica that it may drop, and the bytes for them."""

    capacity_bytes: int
    models: Mapping[str, ResidentModel]

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - sum(model.size_bytes for model in self.models.values())


@dataclass(frozen=True)
class Assign:
    """The replica loads the model, and first drops `evicted`."""

    replica: str
    evicted: tuple[str, ...] = ()


@dataclass(frozen=True)
class TooLarge:
    """No replica has so much memory."""

    capacity_bytes: int


def choose_replica(
    size_bytes: int, replicas: Mapping[str, ReplicaMemory], min_idle_s: float = 0.0
) -> Assign | TooLarge | None:
    """The replica on which a model of this size costs the least; of equal ones that with the most free memory. None
    while every replica uses what it has.

    min_idle_s: models used since are not dropped for it
    """
    capacity_bytes = max((each.capacity_bytes for each in replicas.values()), default=0)
    if replicas and size_bytes > capacity_bytes:
        return TooLarge(capacity_bytes)
    best: tuple[float, int, str] | None = None
    evicted: tuple[str, ...] = ()
    for name, memory in replicas.items():
        candidates = choose_evicted(size_bytes - memory.free_bytes, memory.models, min_idle_s)
        if candidates is None:
            continue
        key = sum(memory.models[each].loss for each in candidates), -memory.free_bytes, name
        if best is None or key < best:
            best, evicted = key, candidates
    return None if best is None else Assign(best[2], evicted)


def choose_evicted(
    needed_bytes: int, models: Mapping[str, ResidentModel], min_idle_s: float = 0.0
) -> tuple[str, ...] | None:
    """The models to drop for so many bytes, the cheapest first; None when those that may be dropped are too small."""
    evicted: list[str] = []
    allowed = [name for name, each in models.items() if each.hold_s <= 0.0 and each.idle_s >= min_idle_s]
    for name in sorted(allowed, key=lambda each: models[each].loss / max(models[each].size_bytes, 1)):
        if needed_bytes <= 0:
            break
        evicted.append(name)
        needed_bytes -= models[name].size_bytes
    if needed_bytes > 0:
        return None
    for name in sorted(evicted, key=lambda each: -models[each].loss):  # what the later, larger ones made unnecessary
        if needed_bytes + models[name].size_bytes <= 0:
            evicted.remove(name)
            needed_bytes += models[name].size_bytes
    return tuple(evicted)


def predict_wait_s(requests_per_s: float, latency: Sequence[tuple[int, float]]) -> float:
    """How long a request waits for the batch before it: that of the least size which keeps up with the requests.

    latency: (rows, seconds) of forwards, ascending. Infinite when no size keeps up; 0 without a measured forward.
    """
    for rows, seconds in latency:
        if requests_per_s * seconds <= rows:
            return min(1.0, requests_per_s * seconds / rows) * seconds
    return math.inf if latency else 0.0


def is_hot(requests_per_s: float, latency: Sequence[tuple[int, float]]) -> bool:
    """Whether a replica alone is too slow for a model's requests, in comparison with its shortest forward."""
    return bool(latency) and predict_wait_s(requests_per_s, latency) > HOT_WAIT_RATIO * latency[0][1]
