"""The controller of an asynchronous training run: orders updates, lets workers go on, and passes signals between them.

Owns the clock and the connections to the servers. Serves workers over a socket. Weights and gradients never pass
through it: a message is a few hundred bytes.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import msgspec

from shoal.sync.parameter_server.clock import Clock, Push
from shoal.sync.parameter_server.rpc import LATER, Caller, Service
from shoal.sync.rank_signals import RankSignals


class Controller:
    """The state of one run. All methods are called by the thread of its service.

    servers: addresses of their services
    """

    def __init__(self, address: str, servers: list[str], clock: Clock, timeout_s: float) -> None:
        self.clock = clock
        self._servers = [Caller(server, timeout_s) for server in servers]
        self._callers: dict[int, bytes] = {}  # of waiting workers
        self._joining: dict[int, bytes] = {}  # workers that came before there were weights
        self._has_weights = False
        self._signals: dict[int, RankSignals] = {}  # since the chief's last exchange; by worker
        self._is_stopping = False
        self.staleness: Counter[int] = Counter()  # of all updates: how often each τ was seen
        methods = {
            name: getattr(self, f"_{name}")
            for name in ("join", "load", "prepare", "exchange", "snapshot", "leave", "stop")
        }
        self.service = Service(address, methods)
        self._began_s = time.monotonic()

    def start(self) -> None:
        self.service.start()

    def close(self) -> None:
        """Idempotent."""
        self.service.close()
        for server in self._servers:
            server.close()

    # -- calls of workers

    def _join(self, caller: bytes, worker: int, is_chief: bool) -> Any:
        """The worker's incarnation, and where the run is; a worker that is not the chief waits for its weights."""
        if not self._has_weights and not is_chief:
            self._joining[worker] = caller
            return LATER
        incarnation = self.clock.join(worker)
        return incarnation, self.clock.get_clock(worker), self.clock.sequence, self.clock.steps, self._has_weights

    def _load(self, caller: bytes, steps: int) -> int:
        """The chief has loaded the servers with the weights after `steps` steps; returns their version."""
        self.clock.resume(steps)
        self._has_weights = True
        for worker, joining in self._joining.items():
            self.service.reply(joining, self._join(joining, worker, False))
        self._joining.clear()
        return self.clock.sequence

    def _prepare(self, caller: bytes, push: dict[str, Any]) -> Any:
        """A worker's gradient is on all servers. Answers when the worker may begin its next step."""
        prepared = msgspec.convert(push, Push)
        self._callers[prepared.worker] = caller
        self._commit(self.clock.prepare(prepared))
        if prepared.worker not in self.clock.workers:
            return None  # it was taken for dead: it joins again
        return LATER

    def _leave(self, caller: bytes, worker: int, incarnation: int) -> None:
        self.remove(worker, incarnation)

    def remove(self, worker: int, incarnation: int) -> None:
        """A worker has ended, or died."""
        self._commit(self.clock.leave(worker, incarnation))

    def _commit(self, updates: list[Any]) -> None:
        for update in updates:
            self.staleness.update(update.staleness)
            for server in self._servers:
                server.send("commit", msgspec.to_builtins(update))
        self._release()

    def _release(self) -> None:
        for worker in self.clock.take_released():
            answer = self.clock.sequence, self.clock.get_clock(worker), self.clock.steps, self._is_stopping
            self.service.reply(self._callers.pop(worker), answer)

    def _snapshot(self, caller: bytes) -> int:
        """Every server keeps its state at one version, which is returned."""
        for server in self._servers:
            server.send("snapshot", self.clock.sequence)
        return self.clock.sequence

    def _exchange(self, caller: bytes, worker: int, is_chief: bool, mine: list[Any]) -> Any:
        """Signals of all workers since the chief's last exchange; only the chief takes the losses."""
        new, old = RankSignals(*mine), self._signals.get(worker, RankSignals())
        self._signals[worker] = new._replace(
            loss=old.loss + new.loss,
            num_losses=old.num_losses + new.num_losses,
            is_not_finite=old.is_not_finite or new.is_not_finite,
        )
        every = list(self._signals.values())
        self._is_stopping = self._is_stopping or any(each.stop for each in every)
        combined = RankSignals(
            stop=self._is_stopping,
            elapsed_s=new.elapsed_s,
            is_not_finite=any(each.is_not_finite for each in every),
            loss=sum(each.loss for each in every),
            num_losses=sum(each.num_losses for each in every),
        )
        if is_chief:
            self._signals = {number: each._replace(loss=0.0, num_losses=0.0) for number, each in self._signals.items()}
        return tuple(combined)

    def _stop(self, caller: bytes) -> None:
        """The chief has ended the run: the others end too, also those that wait for its gradient."""
        self._is_stopping = True
        for worker, waiting in self._callers.items():
            self.service.reply(waiting, (self.clock.sequence, self.clock.get_clock(worker), self.clock.steps, True))
        self._callers.clear()
