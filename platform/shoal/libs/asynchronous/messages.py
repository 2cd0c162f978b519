"""The calls of a run of replicas: what each asks, and the type of its answer.

Used by the workers, servers and the controller of a run. Requests that only elastic training or peers have are in the
modules of their controllers, those of the run's journal in `replicas`. `incarnation` is that of
a server, `version` that of weights: how many updates are in them.
"""

from __future__ import annotations

import msgspec

from shoal.extend.sync import RankSignals, Request
from shoal.libs.asynchronous.clock import Push, Update
from shoal.libs.asynchronous.shared_memory import WeightsAddress

# -- the controller's, by workers


class RunPosition(msgspec.Struct, frozen=True, array_like=True):
    """Where the run is.

    clock:   the number of the worker's next step
    version: of the weights, at least
    """

    incarnation: int
    clock: int
    version: int
    steps: int
    has_weights: bool


class Join(Request[RunPosition], frozen=True):
    """Answered when there are weights; the chief, which brings them, does not wait."""

    worker: int
    is_chief: bool


class GetVersion(Request[int], frozen=True):
    """The version of the weights after so many steps."""

    steps: int


class SetSteps(Request[int], frozen=True):
    """The chief has brought the weights after so many steps. Answers their version."""

    steps: int


class NextStep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker may begin its next step, of `num_batches` micro-batches, with weights of `version` at least."""

    version: int
    clock: int
    steps: int
    is_stopping: bool
    num_batches: int


class PushAgain(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A server has lost the gradient: the worker pushes the same one once more."""


class Prepare(Request[NextStep | PushAgain | None], frozen=True):
    """A gradient is on all servers. None: the worker was taken for dead."""

    push: Push


class ExchangeSignals(Request[RankSignals], frozen=True):
    """Those of all workers since the chief's last exchange."""

    worker: int
    is_chief: bool
    signals: RankSignals


class Marked(msgspec.Struct, frozen=True, array_like=True):
    """A version that every server stores, and the incarnations of the servers that do so."""

    version: int
    server_incarnations: list[int]


class TakeSnapshot(Request[Marked], frozen=True):
    """Every server stores its state at one version."""


class HoldWeights(Request[Marked], frozen=True):
    """Every server stores the weights of one version for this worker."""

    worker: int


class LeaveRun(Request[None], frozen=True):
    """The worker has ended or died: no process waits for it."""

    worker: int


class StopRun(Request[None], frozen=True):
    """The chief has ended the run."""


class LocateServer(Request[str], frozen=True):
    """Its present address, once it has begun."""

    server: int


class WatchRound(Request[bool], frozen=True):
    """Answered when a worker in the round of this number is to push what it has."""

    clock: int


class WorkerCount(msgspec.Struct, frozen=True, array_like=True):
    """Those that take part now, and whether that is too few to go on."""

    workers: list[int]
    is_short: bool


class GetWorkers(Request[WorkerCount], frozen=True):
    """Asked by the process that starts the run."""


# -- the controller's, by servers


class Resumed(msgspec.Struct, frozen=True, array_like=True):
    """The server's incarnation, and the version that it has from now on."""

    incarnation: int
    version: int


class ResumeServer(Request[Resumed | None], frozen=True):
    """A server begins at `address`, for the first time or again, with the state of `version` (-1: none).

    None: the run has weights, and this server none: its state is lost.
    """

    server: int
    version: int
    address: str


# -- a server's, by workers


class ServerAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where its memory is, its incarnation, and the shapes of the model's parameters."""

    memory: WeightsAddress
    incarnation: int
    parameters: list[list[int]]


class GetAddress(Request[ServerAddress], frozen=True):
    pass


class LoadServer(Request[None], frozen=True):
    """A state, as safetensors."""

    state: bytes


class PulledVersions(msgspec.Struct, frozen=True, array_like=True):
    """The server's incarnation, and the versions that its memory has."""

    incarnation: int
    versions: tuple[int, int]


class PullVersions(Request[PulledVersions], frozen=True):
    """Answered when there is the version `needed`."""

    worker: int
    needed: int


class PushGradient(Request[None], frozen=True):
    """A gradient of the elements `begin` to `end` of the server's vector, compressed as the spec says."""

    worker: int
    incarnation: int
    payload: bytes
    begin: int
    end: int


class FetchWeights(Request[bytes | None], frozen=True):
    """The elements `begin` to `end` of the weights of a version, float32. None: have another version stored."""

    worker: int
    version: int
    incarnation: int
    begin: int
    end: int


class DumpState(Request[bytes | None], frozen=True):
    """The state of a version, as safetensors. None: ask for another snapshot."""

    version: int
    incarnation: int


# -- a server's, by the controller, which waits for no answer


class CommitUpdate(Request[None], frozen=True):
    update: Update


class StoreWeights(Request[None], frozen=True):
    """Store the weights of this version for the worker."""

    version: int
    worker: int


class StoreState(Request[None], frozen=True):
    """Store the state of this version."""

    version: int
