"""The controller of an asynchronous training run: orders updates, lets workers go on, and passes signals between them.

Owns the clock, the lives of servers and workers, and the connections to the servers. Serves workers over a socket.
Weights and gradients never pass through it: a message is a few hundred bytes.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from functools import partial
from typing import Any, NamedTuple, cast

from shoal.libs.asynchronous.clock import Clock, Push, Update
from shoal.libs.asynchronous.config import ParameterServerConfig, ServersConfig
from shoal.libs.asynchronous.messages import (
    CommitUpdate,
    ExchangeSignals,
    GetVersion,
    GetWorkers,
    HoldWeights,
    Join,
    LeaveRun,
    LocateServer,
    Marked,
    NextStep,
    NoteWritten,
    Prepare,
    PushAgain,
    Resumed,
    ResumeServer,
    RunPosition,
    SetSteps,
    StopRun,
    StoreState,
    StoreWeights,
    TakeSnapshot,
    WatchRound,
    WorkerCount,
)
from shoal.libs.asynchronous.parameter_server.balance import BatchBalance
from shoal.libs.asynchronous.parameter_server.rounds import RoundClock, make_clock
from shoal.plugins.find import load_reference
from shoal.sync.config import SyncConfig
from shoal.sync.rank_signals import RankSignals
from shoal.sync.rpc import LATER, CallId, CurveKeys, Handlers, Request, RpcClient, RpcService

_DEFAULT = ParameterServerConfig()
PEERS = "shoal.libs.asynchronous.peers:PeerController"


class ControllerSetting(NamedTuple):
    """Of one run: where its controller binds, and who will call.

    servers: their addresses; "" for one that will announce it
    """

    address: str
    servers: list[str]
    num_workers: int
    min_workers: int | None
    timeout_s: float
    keys: CurveKeys | None


class Controller:
    """The state of one run. All methods are called by the thread of its service.

    servers: addresses of their services; "" for one that will announce it
    keys:    of the run, where its processes are on several hosts
    spec:    with `durable`, the updates since the state of each server on its disk are retained here
    """

    def __init__(
        self,
        address: str,
        servers: list[str],
        clock: Clock,
        timeout_s: float,
        keys: CurveKeys | None = None,
        spec: ServersConfig = _DEFAULT,
    ) -> None:
        self.clock = clock
        self._connect = partial(RpcClient, timeout_s=timeout_s, keys=keys)
        self._servers = {index: self._connect(server) for index, server in enumerate(servers) if server}
        self._locating: list[tuple[CallId, int]] = []  # who asks for a server that has not begun
        self._updates: deque[Update] = deque()  # the newest, which a server may not have
        self._confirmed = -1  # a version that every server has had
        self._written = [-1] * len(servers) if spec.durable else []  # the version of each server's state on disk
        self.num_bytes = 0  # of all gradients that became updates or were dropped, as they were sent
        self.num_repeated = 0  # updates that were sent to a server again, since its connection had broken
        self._num_batches = spec.micro_batches
        self._balance = BatchBalance(spec.micro_batches) if spec.is_balanced else None
        self._shares: dict[int, int] = {}  # micro-batches of a worker's next step, where they are balanced
        self._server_incarnations = [0] * len(servers)  # how often each server has started
        self.num_lost = [0] * len(servers)  # updates that were not in the snapshot of a server that came back
        self._waiting: dict[int, CallId] = {}  # workers whose push is prepared
        self._joining: dict[int, CallId] = {}  # workers that came before there were weights
        self._incarnations: dict[int, int] = {}  # of the workers that take part
        self._has_weights = False
        self._signals: dict[int, RankSignals] = {}  # since the chief's last exchange; by worker
        self._is_stopping = False
        self.staleness: Counter[int] = Counter()  # of all updates: how often each τ was seen
        self._watching: dict[bytes, tuple[CallId, int]] = {}  # workers to be called when their round closes
        self.service = RpcService(address, self._list_handlers(), keys, self._advance)

    def start(self) -> None:
        self.service.start()

    def close(self) -> None:
        """Idempotent."""
        self.service.close()
        for server in self._servers.values():
            server.close()

    def describe(self) -> dict[str, dict[str, Any]]:
        """What became of all pushes, as events for the record: how often each τ was seen, what was lost or dropped."""
        clock, counts = self.clock, {str(staleness): count for staleness, count in sorted(self.staleness.items())}
        sent = {"bytes_pushed": self.num_bytes, "repeated": self.num_repeated}
        rounds = {"rounds": clock.round, "late": clock.num_late} if isinstance(clock, RoundClock) else {}
        details = {"counts": counts, "dropped": clock.num_dropped, "lost": sum(self.num_lost), **sent, **rounds}
        return {"staleness": {"updates": clock.sequence, **details}}

    def _list_handlers(self) -> Handlers:
        """Of all that this controller answers."""
        return {
            **self._list_common_handlers(),
            Join: self._join,
            GetVersion: self._get_version,
            SetSteps: self._set_steps,
            Prepare: self._prepare,
            TakeSnapshot: self._take_snapshot,
            HoldWeights: self._hold_weights,
            LocateServer: self._locate_server,
            WatchRound: self._watch_round,
            ResumeServer: self._resume_server,
            NoteWritten: self._note_written,
        }

    def _list_common_handlers(self) -> Handlers:
        """Of what every run of replicas asks."""
        return {
            ExchangeSignals: self._exchange_signals,
            LeaveRun: lambda caller, request: self._leave(request.worker),
            StopRun: lambda caller, request: self._stop(),
            GetWorkers: self._get_workers,
        }

    # -- calls of workers

    def _join(self, caller: CallId, request: Join) -> object:
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

    def _get_version(self, caller: CallId, request: GetVersion) -> int:
        return self.clock.version_after(request.steps)

    def _set_steps(self, caller: CallId, request: SetSteps) -> int:
        """The chief has loaded the servers; returns the version of their weights."""
        if not self._has_weights:
            self.clock.resume(request.steps)
            self._has_weights = True
        for worker, joining in self._joining.items():
            self.service.reply(joining, self._admit_worker(worker))
        self._joining.clear()
        return self.clock.sequence

    def _prepare(self, caller: CallId, request: Prepare) -> object:
        """Answers when the worker may begin its next step."""
        if request.push.server_incarnations != self._server_incarnations:
            return PushAgain()
        return self._take_push(caller, request.push)

    def _take_push(self, caller: CallId, prepared: Push) -> object:
        if self._incarnations.get(prepared.worker) != prepared.incarnation:
            return None  # it was taken for dead
        self._waiting[prepared.worker] = caller
        self.num_bytes += prepared.num_bytes
        if self._balance is not None:
            self._balance.note(prepared.worker, prepared.batch_s)
        self._confirmed = max(self._confirmed, prepared.version)  # it was pulled: every server had it
        self._forget_updates()
        self._commit(self.clock.prepare(prepared, time.monotonic()))
        if self._is_stopping:
            self._answer_all()
        return LATER

    def _leave(self, worker: int) -> None:
        """The worker has ended or died: no one waits for it."""
        incarnation = self._incarnations.pop(worker, 0)
        self._waiting.pop(worker, None)
        self._joining.pop(worker, None)
        self._signals.pop(worker, None)
        self._commit(self.clock.leave(worker, incarnation))

    def _commit(self, updates: list[Update]) -> None:
        for update in updates:
            self.staleness.update(update.staleness)
            self._updates.append(update)
            for server in self._servers.values():
                server.send(CommitUpdate(update))
        if updates and self._balance is not None:
            self._shares = self._balance.divide(self.clock.workers)
        for worker in self.clock.take_released():
            if (caller := self._waiting.pop(worker, None)) is not None:  # else the end of the run has released it
                self._answer(worker, caller)
        closing = [(caller, clock) for caller, clock in self._watching.values() if self.clock.is_closing(clock)]
        for caller, _ in closing:
            del self._watching[caller.identity]
            self.service.reply(caller, True)

    def _advance(self) -> None:
        """Some times a second."""
        self._repeat_lost()
        self._commit(self.clock.advance(time.monotonic()))

    def _watch_round(self, caller: CallId, request: WatchRound) -> object:
        if self.clock.is_closing(request.clock):
            return True
        self._watching[caller.identity] = caller, request.clock
        return LATER

    def _get_workers(self, caller: CallId, request: GetWorkers) -> WorkerCount:
        """At the end of a run they leave one after the other, and none is missing."""
        return WorkerCount(self.clock.workers, self.clock.is_short_of_workers and not self._is_stopping)

    def _answer(self, worker: int, caller: CallId) -> None:
        num_batches = self._shares.get(worker, self._num_batches)
        clock = self.clock.get_clock(worker)
        following = NextStep(self.clock.sequence, clock, self.clock.steps, self._is_stopping, num_batches)
        self.service.reply(caller, following)

    def _take_snapshot(self, caller: CallId, request: TakeSnapshot) -> Marked:
        return self._mark(StoreState(self.clock.sequence))

    def _hold_weights(self, caller: CallId, request: HoldWeights) -> Marked:
        return self._mark(StoreWeights(self.clock.sequence, request.worker))

    def _mark(self, request: Request[None]) -> Marked:
        """Send it to every server, between two updates."""
        for server in self._servers.values():
            server.send(request)
        return Marked(self.clock.sequence, self._server_incarnations)

    def _locate_server(self, caller: CallId, request: LocateServer) -> object:
        if request.server not in self._servers:
            self._locating.append((caller, request.server))
            return LATER
        return self._servers[request.server].address

    def _exchange_signals(self, caller: CallId, request: ExchangeSignals) -> RankSignals:
        """Only the chief takes the losses."""
        new, old = request.signals, self._signals.get(request.worker, RankSignals())
        self._signals[request.worker] = new._replace(
            loss=old.loss + new.loss,
            num_losses=old.num_losses + new.num_losses,
            is_not_finite=old.is_not_finite or new.is_not_finite,
            ends=old.ends or new.ends,
            named_losses=_add_up([old.named_losses, new.named_losses]),
        )
        every = list(self._signals.values())
        self._is_stopping = self._is_stopping or any(each.stop for each in every)
        combined = RankSignals(
            stop=self._is_stopping,
            elapsed_s=new.elapsed_s,
            is_not_finite=any(each.is_not_finite for each in every),
            loss=sum(each.loss for each in every),
            num_losses=sum(each.num_losses for each in every),
            ends=any(each.ends for each in every),
            named_losses=_add_up([each.named_losses for each in every]),
        )
        if request.is_chief:
            self._signals = {
                number: each._replace(loss=0.0, num_losses=0.0, named_losses=())
                for number, each in self._signals.items()
            }
        return combined

    def _stop(self) -> None:
        """The chief has ended the run: the others end too, also those that wait for its gradient."""
        self._is_stopping = True
        self._answer_all()

    def _answer_all(self) -> None:
        for worker, waiting in self._waiting.items():
            self._answer(worker, waiting)
        self._waiting.clear()

    # -- calls of servers

    def _resume_server(self, caller: CallId, request: ResumeServer) -> Resumed | None:
        """Without a log, the updates that the server does not have are lost for its part. Pushes that a worker has
        brought to its earlier life are made again."""
        server, version, address = request.server, request.version, request.address
        if self._has_weights and version < 0:
            return None
        self._server_incarnations[server] += 1
        if server not in self._servers or self._servers[server].address != address:
            if server in self._servers:
                self._servers[server].close()
            self._servers[server] = self._connect(address)
        found = [(asking, index) for asking, index in self._locating if index == server]
        self._locating = [each for each in self._locating if each not in found]
        for asking, _ in found:
            self.service.reply(asking, address)
        if not self._has_weights:
            return Resumed(self._server_incarnations[server], -1, [])
        for worker in self.clock.take_back():
            self.service.reply(self._waiting.pop(worker), PushAgain())
        missing = [each for each in self._updates if each.sequence > version]
        if not self._written:
            self.num_lost[server] += self.clock.sequence - version
        return Resumed(self._server_incarnations[server], self.clock.sequence, missing if self._written else [])

    def _note_written(self, caller: CallId, request: NoteWritten) -> None:
        if self._written:
            self._written[request.server] = request.version
            self._forget_updates()

    def _forget_updates(self) -> None:
        known = min(self._confirmed, *self._written) if self._written else self._confirmed
        while self._updates and self._updates[0].sequence <= known:
            self._updates.popleft()

    def _repeat_lost(self) -> None:
        """Send the newest updates again over a connection that has replaced another: a server applies each once."""
        for server in self._servers.values():
            if server.has_reconnected():
                self.num_repeated += len(self._updates)
                for update in self._updates:
                    server.send(CommitUpdate(update))


def _add_up(every: list[tuple[float, ...]]) -> tuple[float, ...]:
    """The sum of each place; a worker without its first step has none."""
    return tuple(sum(values) for values in itertools.zip_longest(*every, fillvalue=0.0))


def make_server_controller(config: SyncConfig, run: ControllerSetting) -> Controller:
    servers = cast(ServersConfig, config)
    clock = make_clock(servers, run.num_workers, run.min_workers)
    return Controller(run.address, run.servers, clock, run.timeout_s, run.keys, servers)


def make_controller(config: SyncConfig, run: ControllerSetting) -> Controller:
    """The controller that the configuration names. Raises ValueError for one that cannot be imported."""
    made: Controller = load_reference(config.controller or PEERS)(config, run)
    return made
