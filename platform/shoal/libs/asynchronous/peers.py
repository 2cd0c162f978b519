"""Replicas that take steps of their own and exchange tensors in rounds: the base of a user's own synchronizer.

Owns the rounds: in one, each worker that takes part gives tensors, and receives those of the others that it asks for,
once all have given theirs. `PeerController` is in the process that starts the run, `PeerSync` in each worker. A worker
that dies is waited for no more; its replacement begins with the chief's weights after its newest round.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import safetensors.torch
import torch
from torch import Tensor

from shoal.extend.sync import CallId, Replica, Request, SyncConfig, answers
from shoal.extend.train import list_parameters
from shoal.libs.asynchronous.clock import Clock, Push, Update
from shoal.libs.asynchronous.controlled import ControlledSync
from shoal.libs.asynchronous.controller import Controller, ControllerSetting
from shoal.libs.asynchronous.messages import Join, RunPosition, SetSteps


class PublishWeights(Request[None], frozen=True):
    """The chief's weights after so many steps, for workers that join."""

    steps: int
    weights: bytes


class Published(msgspec.Struct, frozen=True, array_like=True):
    """What the chief has published last; b"" before."""

    steps: int
    weights: bytes


class GetPublished(Request[Published], frozen=True):
    pass


class Gathered(msgspec.Struct, frozen=True, array_like=True):
    """What workers gave to the round that has ended; nothing when the run ends."""

    clock: int
    round: int
    is_stopping: bool
    given: dict[int, bytes]


class Gather(Request[Gathered | None], frozen=True):
    """Answered when all have given theirs. None: the worker was taken for dead.

    workers: whose are needed; None: all
    """

    push: Push
    given: bytes
    workers: list[int] | None


class PeerController(Controller):
    """One run's. A round is a step of the `Clock`; tensors pass through as bytes."""

    def __init__(self, config: SyncConfig, run: ControllerSetting) -> None:
        super().__init__(run, Clock(run.num_workers, min_workers=run.min_workers))
        self._published = Published(0, b"")
        self._given: dict[int, bytes] = {}  # of the present round, by worker
        self._wanted: dict[int, list[int] | None] = {}
        self._round: dict[int, bytes] = {}  # of the round that ends now; nothing when the run ends

    def describe(self) -> dict[str, dict[str, Any]]:
        return {"peers": {"rounds": self.clock.sequence}}

    @answers(PublishWeights)
    def publish(self, caller: CallId, request: PublishWeights) -> None:
        self._published = Published(request.steps, request.weights)
        self.set_steps(caller, SetSteps(0))

    @answers(GetPublished)
    def get_published(self, caller: CallId, request: GetPublished) -> Published:
        return self._published

    @answers(Gather)
    def gather(self, caller: CallId, request: Gather) -> object:
        worker = request.push.worker
        if self._incarnations.get(worker) != request.push.incarnation:
            return None  # its replacement has its place
        self._given[worker], self._wanted[worker] = request.given, request.workers
        return self._take_push(caller, request.push)

    def _leave(self, worker: int) -> None:
        super()._leave(worker)
        self._given.pop(worker, None)
        self._wanted.pop(worker, None)

    def _commit(self, updates: list[Update]) -> None:
        self._round = {push.worker: self._given.pop(push.worker) for update in updates for push in update.pushes}
        super()._commit(updates)
        self._round = {}

    def _answer(self, worker: int, caller: CallId) -> None:
        wanted = self._wanted.pop(worker)
        given = {each: tensors for each, tensors in self._round.items() if wanted is None or each in wanted}
        clock = self.clock.get_clock(worker)
        self.service.reply(caller, Gathered(clock, self.clock.sequence, self._is_stopping, given))


class PeerSync(ControlledSync):
    """Worker `worker` of `num_workers`; each has the optimiser of the run, over weights of its own.

    A subclass implements `after_step`, which calls `gather` in the same steps on every worker.

    config:  with the fields of the spec, `sync.FIELD=...`
    weights: the parameters, in one order on all workers
    steps:   finished steps of the run: those of this worker, and before it began
    round:   how many rounds the run has had, the same on every worker
    """

    def __init__(self, replica: Replica) -> None:
        connection = replica.require_connection()
        # A call that waits for the others has the model in it, and is not lost while the controller lives.
        super().__init__(connection, again_s=connection.timeout_s)
        self.config = replica.config
        self.worker = connection.index
        self.num_workers = connection.num_workers
        self.weights = list_parameters(replica.optimizer)
        self._model, self._optimizer = replica.model, replica.optimizer
        self.steps = self.round = self._published = 0

    @abstractmethod
    def after_step(self) -> None:
        """Called after each step of this worker's optimiser."""

    def gather(self, tensors: Sequence[Tensor], workers: Collection[int] | None = None) -> dict[int, list[Tensor]]:
        """Give tensors, and wait until every worker that takes part has given its own.

        workers: whose tensors are needed; None: all, this worker's included

        Returns them by worker, on the device of `tensors`. One that has died or left is missing; when the
        run ends, all are.
        Raises WorkerDeparted when this worker was taken for dead.
        """
        began_s = time.perf_counter()
        push = Push(self._worker, self._incarnation, self._clock, self.round)
        wanted = None if workers is None else list(workers)
        answer = self._pushes.call(Gather(push, _encode(tensors), wanted))
        if answer is None:
            self._end_as_lost()
        self._clock = answer.clock
        self.round = answer.round
        self._is_stopping = answer.is_stopping
        self.waited_s += time.perf_counter() - began_s
        device = tensors[0].device if tensors else torch.device("cpu")
        return {worker: [each.to(device) for each in _decode(given)] for worker, given in answer.given.items()}

    def begin(self, step: int) -> int:
        joined: RunPosition = self._controller.call(Join(self._worker, self.is_chief))
        self._incarnation = joined.incarnation
        self._clock = joined.clock
        self.round = joined.version
        if joined.has_weights:
            published = self._controller.call(GetPublished())
            self.steps, self._published = published.steps, self.round
            self.load_weights(_decode(published.weights))
        else:
            self.steps = step
            self._publish()
        return self.steps

    def load_weights(self, tensors: Sequence[Tensor]) -> None:
        """Put them into the model."""
        with torch.no_grad():
            for own, given in zip(self.weights, tensors, strict=True):
                own.copy_(given)

    def _publish(self) -> None:
        self._published = self.round
        self._controller.call(PublishWeights(self.steps, _encode(self.weights)))

    def before_step(self) -> None:
        self._leave_if_noticed()

    def before_evaluation(self) -> None:
        """The chief's own weights are evaluated."""

    def apply_gradients(self) -> int:
        self._optimizer.step()
        self._model.on_optimizer_step()
        self.num_steps += 1
        self.steps += 1
        if not self._is_stopping:
            self.after_step()
        if self.is_chief and self.round > self._published and not self._is_stopping:
            self._publish()
        return self.steps

    def collect_state(self) -> None:
        """The chief's own weights and optimiser are saved."""


def _encode(tensors: Sequence[Tensor]) -> bytes:
    named = {f"{index:08}": each.detach().contiguous() for index, each in enumerate(tensors)}
    encoded: bytes = safetensors.torch.save(named)
    return encoded


def _decode(encoded: bytes) -> list[Tensor]:
    named = safetensors.torch.load(encoded)
    return [named[name] for name in sorted(named)]
