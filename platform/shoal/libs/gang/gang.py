"""The replica's side of its workers: starts them, sends them versions and micro-batches, replaces them when one dies.

Made by the replica, called by `template` from the threads that load and that compute. Knows no Ray: a launcher starts
the workers. All of them are replaced together, with every loaded version; meanwhile requests get 503. Spare workers,
which have started and hold no version, take their place, so that this lasts as long as a version's loading: they have
built its model once, since the imports of that (torch's meta device needs 200 modules) take longer than its weights.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from secrets import token_bytes
from typing import Any, Protocol

from shoal.errors import ClusterError, InferenceError, ShoalError
from shoal.libs.gang.messages import (
    Address,
    BuildModel,
    DropVersion,
    JoinGang,
    LoadVersion,
    RunBatch,
    WorkerAnswer,
    close,
    connect,
)
from shoal.serve.model.formats.template import Arrays
from shoal.serve.spec.endpoint import GangSplit

logger = logging.getLogger(__name__)
Workers = tuple[Sequence[Address], Sequence[Connection]]
RETRY_AFTER_S = 1.0
REPLACE_S = 120.0  # after which the replica itself is to be replaced
SECRET_BYTES = 32


class Launcher(Protocol):
    """Starts and ends the workers' processes."""

    def start(self, count: int, secret: bytes) -> list[Address]:
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

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.reason,))


class Team:
    """The workers of one start, which end together.

    on_lost: called, in a thread, when one is lost
    """

    def __init__(self, connections: Sequence[Connection], on_lost: Callable[[Team], None]) -> None:
        self._connections, self._on_lost = connections, on_lost
        self._sending, self._failing = threading.Lock(), threading.Lock()
        self._pending: list[deque[Future[Any]]] = [deque() for _ in connections]
        self.loss: GangLost | None = None
        self.ranks = range(len(connections))
        for rank in self.ranks:
            threading.Thread(target=self._read, args=(rank,), name=f"shoal-gang-{rank}", daemon=True).start()

    def broadcast(self, message: Any, answering: Sequence[int] | None = None) -> list[Future[Any]]:
        """Send a message to all workers; all of them answer, or these. Raises GangLost."""
        return self.send(dict.fromkeys(self.ranks, ForkingPickler.dumps(message)), answering)

    def send(self, pickled: Mapping[int, Any], answering: Sequence[int] | None = None) -> list[Future[Any]]:
        """Send messages, by rank. All workers get the same order. Raises GangLost."""
        answers: list[Future[Any]] = []
        with self._sending:
            if self.loss is not None:
                raise self.loss
            for rank in pickled if answering is None else answering:
                answers.append(Future())
                self._pending[rank].append(answers[-1])
            for rank, message in pickled.items():
                try:
                    self._connections[rank].send_bytes(message)
                except OSError as error:  # the thread that reads from it fails all that is pending
                    logger.warning("worker %d takes no message: %s", rank, error)
                    close(self._connections[rank])
        return answers

    def fail(self, reason: str) -> None:
        """Fail all that is pending, and end the connections. Idempotent."""
        with self._failing:
            if self.loss is not None:
                return
            self.loss = GangLost(reason)
        for connection in self._connections:
            close(connection)  # which ends a send that waits for a worker
        with self._sending:
            for pending in self._pending:
                while pending:
                    pending.popleft().set_exception(self.loss)
        self._on_lost(self)

    def _read(self, rank: int) -> None:
        reason = "its connection has ended"
        try:
            while True:
                answer: WorkerAnswer = self._connections[rank].recv()
                waiting = self._pending[rank].popleft()
                if answer.error is not None:
                    waiting.set_exception(answer.error)
                else:
                    waiting.set_result(answer.value)
        except (OSError, EOFError, IndexError) as error:  # of the deque: what waited for the answer has failed
            reason = str(error) or reason
        finally:  # also after an answer that cannot be read
            self.fail(f"worker {rank}: {reason}")


class Gang:
    """The workers of this replica. `start` them first.

    launcher: starts their processes
    split:    how they share a model
    spares:   starts those of as many spare workers; None: lost workers are replaced by some that start then
    """

    def __init__(self, launcher: Launcher, num_workers: int, split: GangSplit, spares: Launcher | None = None) -> None:
        self.num_workers, self.split, self._launcher, self._spares = num_workers, split, launcher, spares
        self._waiting: Workers | None = None  # the spare workers, once all have started
        self._preparing: threading.Thread | None = None
        self._keys = itertools.count(1)
        self._lock = threading.Lock()  # locked while workers start and versions load
        self._loaded: dict[int, LoadVersion] = {}
        self._dropped: queue.SimpleQueue[int] = queue.SimpleQueue()  # a collector of garbage may hold any lock
        self._team: Team | None = None
        self._is_closed, self._lost_s, self._problem = False, 0.0, ""

    @property
    def batches_in_flight(self) -> int:
        """How many batches are computed at once: while one leaves the stages of a pipeline, another enters them."""
        return 2 if self.split == "pipeline" else 1

    def start(self) -> None:
        """Start the workers. Raises ClusterError."""
        with self._lock:
            try:
                self._start_team()
            except GangLost as error:
                raise ClusterError(f"a worker was lost while it started: {error.reason}") from error
        threading.Thread(target=self._send_drops, name="shoal-gang-drops", daemon=True).start()

    def load(self, make: Callable[[int], LoadVersion]) -> int:
        """Load a version on all workers, or on none; returns its key. Raises WeightsError; and GangLost when workers
        are lost twice, by which the version may be to blame."""
        with self._lock:
            try:
                key = self._load(make(next(self._keys)))
            except GangLost:
                if self._team is None:
                    raise
                self._replace_team(self._team)
                key = self._load(make(next(self._keys)))
            self._prepare_spares()
            return key

    def drop(self, key: int) -> None:
        """Free a version that answers no more; the workers have computed its last batch by then."""
        self._dropped.put(key)

    def run(self, key: int, batches: Sequence[Arrays]) -> list[Arrays]:
        """Compute micro-batches, one after the other in each stage. Callable from several threads. Raises GangLost, and
        the model's error."""
        team = self._require_team()
        answering = [0 if self.split == "tensor" else self.num_workers - 1]
        answers = [team.broadcast(RunBatch(key, inputs), answering)[0] for inputs in batches]
        return [answer.result() for answer in answers]

    def check_health(self) -> None:
        """Raise ShoalError when lost workers cannot be replaced: the replica is to be replaced then."""
        if self._problem:
            raise ClusterError(f"the workers of this replica cannot be replaced: {self._problem}")
        if self._lost_s and time.monotonic() - self._lost_s > REPLACE_S:
            raise ClusterError(f"the workers of this replica were not replaced within {REPLACE_S:g} s")

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._is_closed = True
        if self._team is not None:
            self._team.fail("the replica ends")
        if self._preparing is not None:
            self._preparing.join()
        for launcher in filter(None, (self._launcher, self._spares)):
            launcher.stop()

    def _require_team(self) -> Team:
        team = self._team
        if team is None:
            raise GangLost("others are starting")
        return team

    def _load(self, load: LoadVersion) -> int:
        try:
            _load(self._require_team(), load)
        except ShoalError:
            self._dropped.put(load.key)
            raise
        self._loaded[load.key] = load
        return load.key

    def _send_drops(self) -> None:
        while not self._is_closed:
            key = self._dropped.get()
            with self._lock, suppress(GangLost):  # not between the start of others and their loading
                self._loaded.pop(key, None)
                self._require_team().broadcast(DropVersion(key), ())

    def _launch(self, launcher: Launcher) -> Workers:
        """Start the workers of a team, and connect to them. Raises ClusterError, GangLost."""
        secret = token_bytes(SECRET_BYTES)
        addresses = launcher.start(self.num_workers, secret)
        try:
            return addresses, [connect(address, secret) for address in addresses]
        except (OSError, EOFError, AuthenticationError) as error:
            raise GangLost(f"it cannot be reached: {error}") from error

    def _prepare_spares(self) -> None:
        """Start spare workers in a thread, unless there are some. Called with the lock."""
        if self._spares is None or self._waiting or (self._preparing is not None and self._preparing.is_alive()):
            return

        def prepare(launcher: Launcher) -> None:
            try:
                launcher.stop()
                _, connections = workers = self._launch(launcher)
                for load in list(self._loaded.values()):
                    for connection in connections:
                        connection.send(BuildModel(load.config.factory))
                    for connection in connections:
                        if not connection.poll(REPLACE_S):
                            raise GangLost("it does not build the model")
                        connection.recv()
                self._waiting = workers
            except (ShoalError, OSError, EOFError) as error:
                logger.warning("no spare workers, so that the replacement of lost ones takes longer: %s", error)

        self._preparing = threading.Thread(target=prepare, args=(self._spares,), name="shoal-gang-spares", daemon=True)
        self._preparing.start()

    def _start_team(self) -> None:
        if self._preparing is not None:  # it has begun before others could
            self._preparing.join()
        if self._waiting is None:
            addresses, connections = self._launch(self._launcher)
        else:
            assert self._spares is not None
            (addresses, connections), self._waiting = self._waiting, None
            self._launcher, self._spares = self._spares, self._launcher
        team = Team(connections, self._replace)
        _join(team, addresses, self.split)
        for load in list(self._loaded.values()):
            _load(team, load)
        if team.loss is not None:
            raise team.loss
        self._team, self._lost_s = team, 0.0

    def _replace(self, team: Team) -> None:
        """Start others, in the thread that has noticed the loss."""
        with self._lock:
            if self._team is team:
                self._replace_team(team)

    def _replace_team(self, team: Team) -> None:
        if self._is_closed:
            return
        self._team, self._lost_s = None, time.monotonic()
        ends_s = self._lost_s + REPLACE_S
        logger.warning("%s: all workers of this replica are replaced", team.loss)
        while not self._is_closed and time.monotonic() < ends_s:
            self._launcher.stop()
            try:
                self._start_team()
                logger.warning("they are replaced, after %.2f s", time.monotonic() - ends_s + REPLACE_S)
                return self._prepare_spares()
            except GangLost as error:
                logger.warning("another worker was lost while they started: %s", error.reason)
            except ShoalError as error:
                self._problem = str(error)
                return


def _join(team: Team, addresses: Sequence[Address], split: GangSplit) -> None:
    """Connect the workers with each other."""
    size = len(addresses)
    if split == "pipeline":
        following = [*addresses[1:], None]
        answers = _send_joins(team, [JoinGang(rank, size, False, following[rank]) for rank in team.ranks])
    else:
        (port,) = [answer.result() for answer in _send_joins(team, [JoinGang(0, size, True)])]
        store = addresses[0][0], port
        answers = _send_joins(team, [JoinGang(rank, size, True, store=store) for rank in team.ranks[1:]])
    for answer in answers:
        answer.result()


def _send_joins(team: Team, joins: Sequence[JoinGang]) -> list[Future[Any]]:
    return team.send({join.rank: ForkingPickler.dumps(join) for join in joins})


def _load(team: Team, load: LoadVersion) -> None:
    """Raises the first error, once all workers have answered."""
    for error in [answer.exception() for answer in team.broadcast(load)]:
        if error is not None:
            raise error
