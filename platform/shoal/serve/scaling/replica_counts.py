"""What a replica tells the policy: the models' counts and forwards, as one `ReplicaLoad`, and that as flat numbers.

Called by the replica's Ray shell and by the policy's: Ray Serve carries numbers by name. A request is the unit, not a
row: a request of several rows arrives at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from shoal.batching.batcher import BatcherCounts
from shoal.batching.latency_model import ForwardTime, Measured
from shoal.serve.scaling.policy import ReplicaLoad

RETAINED = 0.9  # of the models' past shares, at each report
SECONDS = "seconds_"  # and the number of requests in a batch


@dataclass(frozen=True)
class ModelLoad:
    """One model on a replica. latency: (rows, seconds) of its forwards, empty before the first."""

    counts: BatcherCounts
    waiting: int
    latency: Measured
    max_rows: int


class LoadMeter:
    """`measure` is called about once a second; the models' shares are those of the last seconds."""

    def __init__(self, loop_seconds: Callable[[], float]) -> None:
        self._loop_seconds = loop_seconds  # processor time of the calling thread, which runs the event loop
        self._requests: dict[str, int] = {}  # of the present models
        self._num_arrived = 0
        self._recent: dict[str, float] = {}

    def measure(self, models: Mapping[str, ModelLoad], num_unloaded: int = 0) -> ReplicaLoad:
        """num_unloaded: requests that wait for a model to be loaded"""
        requests = {}
        for name, model in models.items():
            counts = model.counts
            count = requests[name] = counts.submitted + counts.refused_full + counts.refused_late
            before = self._requests.get(name, 0)
            arrived = count - before if count >= before else count  # a model that is loaded again begins at 0
            self._recent[name] = RETAINED * self._recent.get(name, 0.0) + arrived
            self._num_arrived += arrived
        self._requests = requests
        total = sum(self._recent[name] for name in models)
        shares = {name: self._recent[name] / total if total > 1e-6 else 1 / len(models) for name in models}
        waiting = num_unloaded + sum(each.waiting for each in models.values())
        curve = _merge_forwards([(shares[name], each) for name, each in models.items() if shares[name] > 1e-3])
        return ReplicaLoad(self._num_arrived, waiting, self._loop_seconds(), curve)


def _merge_forwards(models: Iterable[tuple[float, ModelLoad]]) -> tuple[tuple[int, float], ...]:
    """(requests, seconds) for the models of a replica, which compute one after the other; empty before a forward.

    k requests belong to a model of share s with the probability 1 - (1 - s)^k, and are then k s of it on average.
    """
    parts = []
    for share, model in models:
        answered = model.counts.answered + model.counts.failed
        rows = max(1.0, model.counts.rows / answered) if answered else 1.0
        if not model.latency:
            return ()
        parts.append((share, rows, ForwardTime(model.latency), model.max_rows))
    most = min((max_rows / (share * rows) for share, rows, _, max_rows in parts), default=0.0)
    curve, size = [], 1
    while size <= max(1.0, most) and parts:
        seconds = 0.0
        for share, rows, forward, max_rows in parts:
            has_any = 1.0 - (1.0 - share) ** size
            seconds += has_any * forward.seconds(min(max_rows, round(size * share * rows / has_any)))
        curve.append((size, seconds))
        size *= 2
    return tuple(curve)


def encode(load: ReplicaLoad) -> dict[str, float]:
    seconds = {f"{SECONDS}{size}": each for size, each in load.curve}
    return {"requests": load.requests, "waiting": load.waiting, "loop_s": load.loop_s, **seconds}


def decode(numbers: Mapping[str, float]) -> ReplicaLoad:
    """What `encode` was given; other numbers are ignored."""
    curve = sorted((int(name[len(SECONDS) :]), each) for name, each in numbers.items() if name.startswith(SECONDS))
    return ReplicaLoad(numbers["requests"], numbers["waiting"], numbers["loop_s"], tuple(curve))
