"""What a replica tells the controller: which versions it has, what it could not do, and what it has counted.

Made by the replica's host, kept by the controller. Pure data, small enough to be sent every second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shoal.serve.messages.auth_failures import AuthFailure
from shoal.serve.messages.metrics_snapshot import ModelSnapshot

# Forwards of one version, by the size of their batch: class c has 2**c rows or more, and fewer than twice as many.
# (how many, their median in seconds)
ForwardMedians = Mapping[int, tuple[int, float]]
MAX_FORWARDS = 64  # of one version and size: the newest, of which the median is
MAX_REJECTED = 16  # versions that are listed, the newest: a run publishes none twice, and its store has only the last
MAX_REASON_CHARS = 2000  # of an error of a model's: who it was written for has the replica's log


def truncate_reason(reason: str) -> str:
    """A reason in the words of an error of anybody's, as every report, status and file can carry it."""
    return reason[:MAX_REASON_CHARS].encode(errors="backslashreplace").decode()


@dataclass(frozen=True)
class RejectedVersion:
    """A version that a replica does not answer with, and why.

    version: 0 when the model itself could not be built
    attempt: of the plan by which it was tried
    instead: the version that answers; 0 for none
    has_answered: whether it answered before, or never
    """

    version: int
    reason: str
    attempt: int = 0
    instead: int = 0
    has_answered: bool = False


@dataclass(frozen=True)
class ModelReport:
    """One model in one replica.

    version:   the one that answers who asks for none; 0 when there is none
    candidate: the one that has a share beside it; 0 when there is none
    staged:    all that could answer at once, or are in memory as they came, ascending
    rejected:  by this replica; of a model that follows a run the newest, oldest first
    counts:    since the replica began to serve the model; None before
    forwards:  the newest forwards of each version
    latency:   (rows, seconds) of a forward, as the batcher's model has it
    """

    version: int = 0
    candidate: int = 0
    staged: tuple[int, ...] = ()
    rejected: tuple[RejectedVersion, ...] = ()
    counts: ModelSnapshot | None = None
    forwards: Mapping[int, ForwardMedians] = field(default_factory=dict)
    queued_rows: int = 0
    latency: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class ReplicaReport:
    """One replica. It has done what the document `generation` says, but for what is still being staged.

    callers:  `Access.counts()`: requests by the name of the key, and what became of them
    refused:  `Access.refused()`
    statuses: all answers over HTTP by status, of inferences and of everything else
    computing_s: how long the forward that is going on has taken; 0 when there is none
    host:     the name of its host
    """

    replica: str
    pid: int = 0
    generation: int = 0
    ready: bool = False
    models: Mapping[str, ModelReport] = field(default_factory=dict)
    callers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    statuses: Mapping[str, int] = field(default_factory=dict)
    refused: tuple[AuthFailure, ...] = ()
    computing_s: float = 0.0
    host: str = ""


def merge_forward_medians(reports: Iterable[ForwardMedians]) -> ForwardMedians:
    """Over several replicas: the numbers added, the medians averaged by them."""
    summed: dict[int, tuple[int, float]] = {}
    for report in reports:
        for size, (count, median_s) in report.items():
            before, before_s = summed.get(size, (0, 0.0))
            summed[size] = (before + count, (before * before_s + count * median_s) / (before + count))
    return summed
