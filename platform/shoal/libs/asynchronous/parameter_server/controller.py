"""The controller of a run with servers: makes pushes updates, sends them to the servers, and knows who has what.

Owns the connections to the servers, their lives, and the updates that one of them may lack. Weights and gradients never
pass through it: a message is a few hundred bytes.
"""

from __future__ import annotations

import heapq
import statistics
from collections import Counter, deque
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from shoal.extend.sync import LATER, CallId, Request, RpcClient, SyncConfig, answers
from shoal.libs.asynchronous.clock import Clock, RoundClock, Update
from shoal.libs.asynchronous.config import LocalStepsConfig, ServersConfig
from shoal.libs.asynchronous.controller import Controller, ControllerSetting
from shoal.libs.asynchronous.messages import (
    CommitUpdate,
    GetVersion,
    HoldWeights,
    LocateServer,
    Marked,
    NextStep,
    Prepare,
    PushAgain,
    Resumed,
    ResumeServer,
    StoreState,
    StoreWeights,
    TakeSnapshot,
    WatchRound,
)

SMOOTHING = 0.5  # the newest measurement's share of a worker's average time


class ServerController(Controller):
    """One run's."""

    def __init__(self, run: ControllerSetting, clock: Clock, spec: ServersConfig) -> None:
        self._connect = partial(RpcClient, timeout_s=run.timeout_s, keys=run.keys)
        self._servers = {index: self._connect(server) for index, server in enumerate(run.servers) if server}
        self._locating: list[tuple[CallId, int]] = []  # who asks for a server that has not begun
        self._updates: deque[Update] = deque()  # the newest, which a server may not have
        self._confirmed = -1  # a version that every server has had
        self._num_bytes = 0  # of all gradients that became updates or were dropped, as they were sent
        self._num_repeated = 0  # updates that were sent to a server again, since its connection had broken
        self._num_batches = spec.micro_batches
        self._balance = BatchBalance(spec.micro_batches) if spec.is_balanced else None
        self._shares: dict[int, int] = {}  # micro-batches of a worker's next step, where they are balanced
        self._server_incarnations = [0] * len(run.servers)  # how often each server has started
        self.num_lost = [0] * len(run.servers)  # updates that were not in the snapshot of a server that came back
        self.staleness: Counter[int] = Counter()  # of all updates: how often each τ was seen
        self._watching: dict[bytes, tuple[CallId, int]] = {}  # workers to be called when their round closes
        super().__init__(run, clock)

    def close(self) -> None:
        super().close()
        for server in self._servers.values():
            server.close()

    def describe(self) -> dict[str, dict[str, Any]]:
        clock = self.clock
        details = {
            "updates": clock.sequence,
            "counts": {str(staleness): count for staleness, count in sorted(self.staleness.items())},
            "dropped": clock.num_dropped,
            "lost": sum(self.num_lost),
            "bytes_pushed": self._num_bytes,
            "repeated": self._num_repeated,
        }
        if isinstance(clock, RoundClock):
            details |= {"rounds": clock.round, "late": clock.num_late}
        return {"staleness": details}

    # -- calls of workers

    @answers(GetVersion)
    def get_version(self, caller: CallId, request: GetVersion) -> int:
        return self.clock.version_after(request.steps)

    @answers(Prepare)
    def prepare(self, caller: CallId, request: Prepare) -> object:
        """Answers when the worker may begin its next step."""
        push = request.push
        if push.server_incarnations != self._server_incarnations:
            return PushAgain()
        if self._incarnations.get(push.worker) == push.incarnation:
            self._num_bytes += push.num_bytes
            if self._balance is not None:
                self._balance.note(push.worker, push.batch_s)
            self._confirmed = max(self._confirmed, push.version)  # it was pulled: every server had it
            while self._updates and self._updates[0].sequence <= self._confirmed:
                self._updates.popleft()
        return self._take_push(caller, push)

    def _answer(self, worker: int, caller: CallId) -> None:
        clock, num_batches = self.clock, self._shares.get(worker, self._num_batches)
        following = NextStep(clock.sequence, clock.get_clock(worker), clock.steps, self._is_stopping, num_batches)
        self.service.reply(caller, following)

    def _commit(self, updates: list[Update]) -> None:
        for update in updates:
            self.staleness.update(update.staleness)
            self._updates.append(update)
            for server in self._servers.values():
                server.send(CommitUpdate(update))
        if updates and self._balance is not None:
            self._shares = self._balance.divide(self.clock.workers)
        super()._commit(updates)
        closing = [(caller, clock) for caller, clock in self._watching.values() if self.clock.is_closing(clock)]
        for caller, _ in closing:
            del self._watching[caller.identity]
            self.service.reply(caller, True)

    @answers(WatchRound)
    def watch_round(self, caller: CallId, request: WatchRound) -> object:
        if self.clock.is_closing(request.clock):
            return True
        self._watching[caller.identity] = caller, request.clock
        return LATER

    @answers(TakeSnapshot)
    def take_snapshot(self, caller: CallId, request: TakeSnapshot) -> Marked:
        return self._mark(StoreState(self.clock.sequence))

    @answers(HoldWeights)
    def hold_weights(self, caller: CallId, request: HoldWeights) -> Marked:
        return self._mark(StoreWeights(self.clock.sequence, request.worker))

    def _mark(self, request: Request[None]) -> Marked:
        """Send it to every server, between two updates."""
        for server in self._servers.values():
            server.send(request)
        return Marked(self.clock.sequence, self._server_incarnations)

    @answers(LocateServer)
    def locate_server(self, caller: CallId, request: LocateServer) -> object:
        if request.server not in self._servers:
            self._locating.append((caller, request.server))
            return LATER
        return self._servers[request.server].address

    # -- calls of servers

    @answers(ResumeServer)
    def resume_server(self, caller: CallId, request: ResumeServer) -> Resumed | None:
        """The updates that the server does not have are lost for its part. Pushes that a worker has brought to its
        earlier life are made again."""
        server = request.server
        version = request.version
        address = request.address
        if self._has_weights and version < 0:
            return None
        self._server_incarnations[server] += 1
        if server not in self._servers or self._servers[server].address != address:
            if server in self._servers:
                self._servers[server].close()
            self._servers[server] = self._connect(address)
        for asking, index in self._locating:
            if index == server:
                self.service.reply(asking, address)
        self._locating = [each for each in self._locating if each[1] != server]
        if not self._has_weights:
            return Resumed(self._server_incarnations[server], -1)
        for worker in self.clock.take_back():
            self.service.reply(self._waiting.pop(worker), PushAgain())
        self.num_lost[server] += self.clock.sequence - version
        return Resumed(self._server_incarnations[server], self.clock.sequence)

    def _advance(self) -> None:
        """Also send the newest updates over a connection that has replaced another; a server applies each once."""
        for server in self._servers.values():
            if server.has_reconnected():
                self._num_repeated += len(self._updates)
                for update in self._updates:
                    server.send(CommitUpdate(update))
        super()._advance()


class BatchBalance:
    """How many micro-batches of a step each worker computes, so that a slow one does not hold up the others.

    With `sync.balance` a worker's number follows the seconds that it takes for one, averaged. A gradient counts by its
    micro-batches, so the gradient of a step stays the mean over all of its samples.

    num_batches: of a worker in a step, on average
    """

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches
        self._seconds: dict[int, float] = {}

    def note(self, worker: int, batch_s: float) -> None:
        """A worker has taken so long for a micro-batch of its last step."""
        before = self._seconds.get(worker, batch_s)
        self._seconds[worker] = before + SMOOTHING * (batch_s - before)

    def divide(self, workers: list[int]) -> dict[int, int]:
        """Micro-batches of each worker in the next step."""
        known = [self._seconds[worker] for worker in workers if worker in self._seconds]
        usual = statistics.mean(known) if known else 1.0
        seconds = {worker: self._seconds.get(worker, usual) for worker in workers}
        return divide_batches(self._num_batches * len(workers), seconds)


def divide_batches(num_batches: int, seconds: Mapping[int, float]) -> dict[int, int]:
    """Divide micro-batches among workers so that the last one ends as early as possible; each gets at least one.

    seconds: that a worker takes for one

    Each batch goes to the worker that would end it first, which is optimal for equal batches.
    """
    shares = dict.fromkeys(seconds, 1)
    ends = [(2 * each, worker) for worker, each in seconds.items()]
    heapq.heapify(ends)
    for _ in range(num_batches - len(shares)):
        end, worker = ends[0]
        shares[worker] += 1
        heapq.heapreplace(ends, (end + seconds[worker], worker))
    return shares


def make_clock(spec: ServersConfig, num_workers: int, min_workers: int | None = None) -> Clock:
    """The clock of a run with `num_workers` places, which goes on with `min_workers`."""
    if isinstance(spec, LocalStepsConfig) and spec.staleness == 0:
        return RoundClock(num_workers, 0, min_workers=min_workers, quorum=spec.quorum, grace_s=spec.grace_s)
    return Clock(num_workers, spec.staleness, spec.num_backups, min_workers=min_workers)


def make_server_controller(config: SyncConfig, run: ControllerSetting) -> ServerController:
    spec = cast(ServersConfig, config)
    return ServerController(run, make_clock(spec, run.num_workers, run.min_workers), spec)
