"""The controller of a run of replicas: who takes part, when a worker begins its next step, and signals between them.

Owns the clock, the lives of workers, and the calls that wait for an answer. Serves workers over a socket, in one
thread. Each kind has one of its own, derived from it: for servers, for elastic training, for rounds of peers.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from shoal.extend.sync import LATER, CallId, CurveKeys, RankSignals, RpcService, SyncConfig, answers, list_handlers
from shoal.libs.asynchronous.clock import Clock, Push, Update
from shoal.libs.asynchronous.messages import (
    ExchangeSignals,
    GetWorkers,
    Join,
    LeaveRun,
    RunPosition,
    SetSteps,
    StopRun,
    WorkerCount,
)
from shoal.plugins.find import load_reference

PEERS = "shoal.libs.asynchronous.peers:PeerController"


class ControllerSetting(NamedTuple):
    """Where the controller of a run binds, and who will call.

    servers: their addresses; "" for one that will announce it
    keys:    of the run, where its processes are on several hosts
    """

    address: str
    servers: list[str]
    num_workers: int
    min_workers: int | None
    timeout_s: float
    keys: CurveKeys | None = None


class Controller(ABC):
    """The state of one run. All methods but `start` and `close` are called by the thread of its service."""

    def __init__(self, run: ControllerSetting, clock: Clock) -> None:
        self.clock = clock
        self._waiting: dict[int, CallId] = {}  # workers whose push is prepared
        self._joining: dict[int, CallId] = {}  # workers that came before there were weights
        self._incarnations: dict[int, int] = {}  # of the workers that take part
        self._signals: dict[int, RankSignals] = {}  # since the chief's last exchange; by worker
        self._has_weights = self._is_stopping = False
        self.service = RpcService(run.address, list_handlers(self), run.keys, self._advance)

    def start(self) -> None:
        self.service.start()

    def close(self) -> None:
        """Idempotent."""
        self.service.close()

    @abstractmethod
    def describe(self) -> dict[str, dict[str, Any]]:
        """What became of the run's steps: events for its record, by their kinds."""

    @abstractmethod
    def _answer(self, worker: int, caller: CallId) -> None:
        """Answer a worker's push: it may begin its next step, or the run ends."""

    # -- membership

    @answers(Join)
    def join(self, caller: CallId, request: Join) -> object:
        """A worker that is not the chief waits for its weights."""
        if not self._has_weights and not request.is_chief:
            self._joining[request.worker] = caller
            return LATER
        return self._admit_worker(request.worker)

    def _admit_worker(self, worker: int) -> RunPosition:
        self._incarnations[worker] = incarnation = self.clock.join(worker)
        self._commit(self.clock.advance(time.monotonic()))  # those that have waited for it go on
        clock = self.clock
        return RunPosition(incarnation, clock.get_clock(worker), clock.sequence, clock.steps, self._has_weights)

    @answers(SetSteps)
    def set_steps(self, caller: CallId, request: SetSteps) -> int:
        """The chief has brought the weights; returns their version."""
        if not self._has_weights:
            self.clock.resume(request.steps)
            self._has_weights = True
        for worker, joining in self._joining.items():
            self.service.reply(joining, self._admit_worker(worker))
        self._joining.clear()
        return self.clock.sequence

    @answers(LeaveRun)
    def leave_run(self, caller: CallId, request: LeaveRun) -> None:
        self._leave(request.worker)

    def _leave(self, worker: int) -> None:
        """The worker has ended or died: no process waits for it."""
        incarnation = self._incarnations.pop(worker, 0)
        self._waiting.pop(worker, None)
        self._joining.pop(worker, None)
        self._signals.pop(worker, None)
        self._commit(self.clock.leave(worker, incarnation))

    @answers(GetWorkers)
    def get_workers(self, caller: CallId, request: GetWorkers) -> WorkerCount:
        """At the end of a run they leave one after the other, and none is missing."""
        return WorkerCount(self.clock.workers, self.clock.is_short_of_workers and not self._is_stopping)

    @answers(StopRun)
    def stop_run(self, caller: CallId, request: StopRun) -> None:
        """The chief has ended the run: the others end too, also those that wait for its gradient."""
        self._is_stopping = True
        self._answer_all()

    # -- steps

    def _take_push(self, caller: CallId, push: Push) -> object:
        """Give a push to the clock. The worker gets its answer when it may begin its next step; None: it was taken for
        dead."""
        if self._incarnations.get(push.worker) != push.incarnation:
            return None
        self._waiting[push.worker] = caller
        self._commit(self.clock.prepare(push, time.monotonic()))
        if self._is_stopping:
            self._answer_all()
        return LATER

    def _commit(self, updates: list[Update]) -> None:
        """These updates are made: release the workers that may go on."""
        for worker in self.clock.take_released():
            if (caller := self._waiting.pop(worker, None)) is not None:  # else the end of the run has released it
                self._answer(worker, caller)

    def _advance(self) -> None:
        """Called some times a second."""
        self._commit(self.clock.advance(time.monotonic()))

    def _answer_all(self) -> None:
        for worker, caller in self._waiting.items():
            self._answer(worker, caller)
        self._waiting.clear()

    # -- signals

    @answers(ExchangeSignals)
    def exchange_signals(self, caller: CallId, request: ExchangeSignals) -> RankSignals:
        """Only the chief takes the losses."""
        new, old = request.signals, self._signals.get(request.worker, RankSignals())
        self._signals[request.worker] = _combine([old, new])._replace(stop=new.stop)
        combined = _combine(list(self._signals.values()))
        self._is_stopping = self._is_stopping or combined.stop
        if request.is_chief:
            self._signals = {
                worker: each._replace(loss=0.0, num_losses=0.0, named_losses=())
                for worker, each in self._signals.items()
            }
        return combined._replace(stop=self._is_stopping, elapsed_s=new.elapsed_s)


def _combine(signals: list[RankSignals]) -> RankSignals:
    """The signals of any, and the sums of the losses; a worker without its first step has no named ones."""
    named = itertools.zip_longest(*(each.named_losses for each in signals), fillvalue=0.0)
    return RankSignals(
        stop=any(each.stop for each in signals),
        elapsed_s=signals[-1].elapsed_s,
        is_not_finite=any(each.is_not_finite for each in signals),
        loss=sum(each.loss for each in signals),
        num_losses=sum(each.num_losses for each in signals),
        ends=any(each.ends for each in signals),
        named_losses=tuple(sum(values) for values in named),
    )


def make_controller(config: SyncConfig, run: ControllerSetting) -> Controller:
    """The controller that the configuration names. Raises ValueError for one that cannot be imported."""
    controller: Controller = load_reference(config.controller or PEERS)(config, run)
    return controller
