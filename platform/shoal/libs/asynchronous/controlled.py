"""A synchronizer whose replicas are processes of their own, which find each other through the run's controller.

Owns a worker's two connections with the controller: for calls that are answered at once, and for pushes, whose answer
may be awaited for long. The base of those for parameter servers, elastic training and rounds of peers.
"""

from __future__ import annotations

import time
from typing import NoReturn

from shoal.errors import WorkerDeparted
from shoal.extend.sync import Connection, RankSignals, RpcClient, Synchronizer
from shoal.libs.asynchronous.messages import ExchangeSignals, LeaveRun, StopRun

EXCHANGE_S = 0.25  # between two exchanges of signals
CHIEF = 0


class ControlledSync(Synchronizer):
    """A worker of a run; the chief, which evaluates, saves and reports, is worker 0.

    again_s:   after which a push without an answer is sent again, on one host
    num_steps: of this worker
    """

    def __init__(self, connection: Connection, again_s: float = 1.0) -> None:
        self._worker, self.is_chief = connection.index, connection.index == CHIEF
        self._is_noticed = connection.is_noticed
        self._controller = RpcClient(connection.controller, connection.timeout_s, keys=connection.keys)
        self._pushes = RpcClient(connection.controller, connection.timeout_s, again_s, connection.keys)
        self._incarnation = self._clock = 0
        self._is_stopping = False
        self.num_steps = 0
        self.waited_s = 0.0
        self._exchanged_s = time.monotonic()

    def _leave_if_noticed(self) -> None:
        """Raises WorkerDeparted."""
        if self._is_noticed():
            self._controller.call(LeaveRun(self._worker))
            raise WorkerDeparted(f"worker {self._worker} left after {self.num_steps:,} steps of its own")

    def _end_as_lost(self) -> NoReturn:
        """This worker was taken for dead, as after its host could not be reached. Raises WorkerDeparted."""
        problem = f"worker {self._worker} was taken for dead, and another has its place"
        raise WorkerDeparted(problem, is_over=True)

    def is_exchange_due(self) -> bool:
        return self._is_stopping or time.monotonic() - self._exchanged_s > EXCHANGE_S

    def exchange(self, mine: RankSignals) -> RankSignals:
        self._exchanged_s = time.monotonic()
        return self._controller.call(ExchangeSignals(self._worker, self.is_chief, mine))

    def end(self) -> None:
        """The chief has decided that the run ends."""
        if self.is_chief:
            self._controller.call(StopRun())
        else:
            self._controller.call(LeaveRun(self._worker))

    def close(self) -> None:
        self._controller.close()
        self._pushes.close()
