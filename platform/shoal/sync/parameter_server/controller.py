"""The controller of an asynchronous training run: orders updates, lets workers go on, and passes signals between them.

Owns the clock, the lives of servers and workers, and the connections to the servers. Serves workers over a socket.
Weights and gradients never pass through it: a message is a few hundred bytes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import msgspec

from shoal.errors import TrainError
from shoal.sync.parameter_server.clock import Clock, Push, Update
from shoal.sync.parameter_server.rpc import LATER, CallId, RpcClient, RpcService
from shoal.sync.rank_signals import RankSignals

AGAIN = "again"  # the answer to a push that a server has lost: the worker pushes the same gradient once more


class Controller:
    """The state of one run. All methods are called by the thread of its service.

    servers: addresses of their services
    """

    def __init__(self, address: str, servers: list[str], clock: Clock, timeout_s: float) -> None:
        self.clock = clock
        self._servers = [RpcClient(server, timeout_s) for server in servers]
        self._lives = [0] * len(servers)  # how often each server has started
        self.num_lost = [0] * len(servers)  # updates that were not in the snapshot of a server that came back
        self._waiting: dict[int, CallId] = {}  # workers whose push is prepared
        self._joining: dict[int, CallId] = {}  # workers that came before there were weights
        self._incarnations: dict[int, int] = {}  # of the workers that take part
        self._has_weights = False
        self._signals: dict[int, RankSignals] = {}  # since the chief's last exchange; by worker
        self._is_stopping = False
        self.staleness: Counter[int] = Counter()  # of all updates: how often each τ was seen
        names = ("join", "get_version", "load", "prepare", "exchange", "snapshot", "leave", "stop")
        self.service = RpcService(address, {name: getattr(self, f"_{name}") for name in (*names, "resume_server")})

    def start(self) -> None:
        self.service.start()

    def close(self) -> None:
        """Idempotent."""
        self.service.close()
        for server in self._servers:
            server.close()

    # -- calls of workers

    def _join(self, caller: CallId, worker: int, is_chief: bool) -> Any:
        """The worker's incarnation, and where the run is; a worker that is not the chief waits for its weights."""
        if not self._has_weights and not is_chief:
            self._joining[worker] = caller
            return LATER
        self._incarnations[worker] = incarnation = self.clock.join(worker)
        return incarnation, self.clock.get_clock(worker), self.clock.sequence, self.clock.steps, self._has_weights

    def _get_version(self, caller: CallId, steps: int) -> int:
        """The version of the weights after `steps` steps."""
        return self.clock.version_after(steps)

    def _load(self, caller: CallId, steps: int) -> int:
        """The chief has loaded the servers with the weights after `steps` steps; returns their version."""
        if not self._has_weights:
            self.clock.resume(steps)
            self._has_weights = True
        for worker, joining in self._joining.items():
            self.service.reply(joining, self._join(joining, worker, False))
        self._joining.clear()
        return self.clock.sequence

    def _prepare(self, caller: CallId, push: dict[str, Any]) -> Any:
        """A worker's gradient is on all servers. Answers when the worker may begin its next step."""
        prepared = msgspec.convert(push, Push)
        if prepared.lives != self._lives:
            return AGAIN
        if self._incarnations.get(prepared.worker) != prepared.incarnation:
            return None  # it was taken for dead
        self._waiting[prepared.worker] = caller
        self._commit(self.clock.prepare(prepared))
        if self._is_stopping:
            self._answer_all()
        return LATER

    def _leave(self, caller: CallId, worker: int) -> None:
        """The worker has ended or died: no one waits for it."""
        incarnation = self._incarnations.pop(worker, 0)
        self._waiting.pop(worker, None)
        self._joining.pop(worker, None)
        self._signals.pop(worker, None)
        self._commit(self.clock.leave(worker, incarnation))

    def _commit(self, updates: list[Update]) -> None:
        for update in updates:
            self.staleness.update(update.staleness)
            for server in self._servers:
                server.send("commit", msgspec.to_builtins(update))
        for worker in self.clock.take_released():
            self._answer(worker, self._waiting.pop(worker))

    def _answer(self, worker: int, caller: CallId) -> None:
        state = self.clock.sequence, self.clock.get_clock(worker), self.clock.steps, self._is_stopping
        self.service.reply(caller, state)

    def _snapshot(self, caller: CallId) -> int:
        """Every server keeps its state at one version, which is returned."""
        for server in self._servers:
            server.send("snapshot", self.clock.sequence)
        return self.clock.sequence

    def _exchange(self, caller: CallId, worker: int, is_chief: bool, mine: list[Any]) -> Any:
        """Signals of all workers since the chief's last exchange; only the chief takes the losses."""
        new, old = RankSignals(*mine), self._signals.get(worker, RankSignals())
        self._signals[worker] = new._replace(
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
        if is_chief:
            self._signals = {
                number: each._replace(loss=0.0, num_losses=0.0, named_losses=())
                for number, each in self._signals.items()
            }
        return tuple(combined)

    def _stop(self, caller: CallId) -> None:
        """The chief has ended the run: the others end too, also those that wait for its gradient."""
        self._is_stopping = True
        self._answer_all()

    def _answer_all(self) -> None:
        for worker, waiting in self._waiting.items():
            self._answer(worker, waiting)
        self._waiting.clear()

    # -- calls of servers

    def _resume_server(self, caller: CallId, server: int, version: int) -> Any:
        """A server begins, for the first time or again, with the state of `version` (-1: none).

        Returns its life, and the version that it has from now on: the updates between them are lost for its part.
        Pushes that a worker has written to its earlier life are made again.
        """
        if self._has_weights and version < 0:
            raise TrainError(f"server {server} died and left no state")
        self._lives[server] += 1
        if self._has_weights:
            self.num_lost[server] += self.clock.sequence - version
            for worker in self.clock.take_back():
                self.service.reply(self._waiting.pop(worker), AGAIN)
        return self._lives[server], self.clock.sequence if self._has_weights else -1


def _add_up(every: list[tuple[float, ...]]) -> tuple[float, ...]:
    """The sum of each place; a worker without its first step has none."""
    return tuple(sum(values) for values in itertools.zip_longest(*every, fillvalue=0.0))
