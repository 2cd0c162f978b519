"""The workers of one start: their connections, and what has become of each message.

Made by `gang`, and called from the replica's threads. Knows no Ray: a launcher starts the workers.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from shoal.errors import ConnectionLost, InferenceError
from shoal.extend.serve import GangSplit
from shoal.extend.sync import Channel, ChannelAddress, Packer, connect
from shoal.libs.gang.messages import JoinGang, LoadVersion, WorkerAnswer

logger = logging.getLogger(__name__)
RETRY_AFTER_S = 1.0


class Launcher(Protocol):
    """Starts and ends the workers' processes."""

    def start(self, count: int) -> list[ChannelAddress]:
        """Start so many, and return where each listens. Raises ClusterError."""
        ...

    def stop(self) -> None:
        """End all of them at once, those that hang too. Idempotent."""
        ...


class GangLost(InferenceError):
    """A worker of the replica has died, or its host: what it computed is lost, and the next try may succeed."""

    def __init__(self, reason: str) -> None:
        super().__init__(503, f"a worker of this replica is lost ({reason}); try again later", RETRY_AFTER_S)
        self.reason = reason


class StartedWorkers(NamedTuple):
    """Workers that a launcher has started, with a connection to each."""

    addresses: Sequence[ChannelAddress]
    channels: Sequence[Channel]

    @classmethod
    def start(cls, launcher: Launcher, count: int) -> StartedWorkers:
        """Start workers, and connect to them. Raises ClusterError, GangLost."""
        addresses = launcher.start(count)
        try:
            channels = [connect(address) for address in addresses]
            for channel in channels:
                channel.receive()
            return cls(addresses, channels)
        except ConnectionLost as error:
            raise GangLost(f"it cannot be reached: {error}") from error


class Team:
    """The workers of one start, which end together. `join` them first.

    on_lost: called, in a thread, when one is lost
    """

    def __init__(self, workers: StartedWorkers, on_lost: Callable[[Team], None]) -> None:
        self._addresses, self._channels = workers
        self._on_lost = on_lost
        self._sending, self._failing = threading.Lock(), threading.Lock()
        self._pending: list[deque[Future[Any]]] = [deque() for _ in self._channels]
        self.loss: GangLost | None = None
        self._ranks = range(len(self._channels))
        for rank in self._ranks:
            threading.Thread(target=self._read, args=(rank,), name=f"shoal-gang-{rank}", daemon=True).start()

    def join(self, split: GangSplit) -> None:
        """Connect the workers with each other. Raises GangLost."""
        size = len(self._addresses)
        if split == "pipeline":
            following = [*self._addresses[1:], None]
            joins = [JoinGang(rank, size, False, following[rank]) for rank in self._ranks]
        else:
            (port,) = self._send(JoinGang(0, size, True), [0], [0])
            store = self._addresses[0].host, port.result()
            joins = [JoinGang(rank, size, True, store=store) for rank in self._ranks[1:]]
        answers = [self._send(join, [join.rank], [join.rank])[0] for join in joins]
        for answer in answers:
            answer.result()

    def load(self, version: LoadVersion) -> None:
        """Load a version on all workers. Raises the first error, once all have answered."""
        for error in [answer.exception() for answer in self.broadcast(version)]:
            if error is not None:
                raise error

    def broadcast(self, message: Any, answering: Sequence[int] | None = None) -> list[Future[Any]]:
        """Send a message to all workers; all of them answer, or these. Raises GangLost."""
        return self._send(message, self._ranks, self._ranks if answering is None else answering)

    def _send(self, message: Any, ranks: Sequence[int], answering: Sequence[int]) -> list[Future[Any]]:
        """Send a message to these workers: each gets its messages in one order."""
        packed = Packer().pack(message)
        answers: list[Future[Any]] = []
        with self._sending:
            if self.loss is not None:
                raise self.loss
            for rank in answering:
                answers.append(Future())
                self._pending[rank].append(answers[-1])
            for rank in ranks:
                try:
                    self._channels[rank].send_packed(packed)
                except ConnectionLost as error:  # the thread that reads from it fails all that is pending
                    logger.warning("worker %d takes no message: %s", rank, error)
                    self._channels[rank].close()
        return answers

    def fail(self, reason: str) -> None:
        """Fail all that is pending, and end the connections. Idempotent."""
        with self._failing:
            if self.loss is not None:
                return
            self.loss = GangLost(reason)
        for channel in self._channels:
            channel.close()  # which ends a send that waits for a worker
        with self._sending:
            for pending in self._pending:
                while pending:
                    pending.popleft().set_exception(self.loss)
        self._on_lost(self)

    def _read(self, rank: int) -> None:
        reason = "its connection has ended"
        try:
            while True:
                answer: WorkerAnswer = self._channels[rank].receive()
                waiting = self._pending[rank].popleft()
                if answer.error is not None:
                    waiting.set_exception(answer.error)
                else:
                    waiting.set_result(answer.value)
        except (ConnectionLost, IndexError) as error:  # of the deque: what waited for the answer has failed
            reason = str(error)
        finally:  # also after an answer that cannot be read
            self.fail(f"worker {rank}: {reason}")
