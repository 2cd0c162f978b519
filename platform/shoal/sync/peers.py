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

from shoal.errors import TrainError
from shoal.sync.config import SyncConfig
from shoal.sync.controlled import ControlledSync
from shoal.sync.parameter_server.clock import Clock, Push, Update
from shoal.sync.parameter_server.controller import Controller, ControllerSetting
from shoal.sync.parameter_server.rpc import LATER, CallId
from shoal.sync.synchronizer import Replica


class PeerController(Controller):
    """Of one run. A round is a step of the `Clock`; tensors pass through as bytes."""

    calls = ("join", "publish", "gather", "exchange", "leave", "stop", "get_workers")

    def __init__(self, config: SyncConfig, run: ControllerSetting) -> None:
        clock = Clock(run.num_workers, min_workers=run.min_workers)
        super().__init__(run.address, [], clock, run.timeout_s, run.keys)
        self._steps, self._weights = 0, b""  # of the chief, for workers that join
        self._given: dict[int, bytes] = {}  # of the present round, by worker
        self._wanted: dict[int, list[int] | None] = {}
        self._round: dict[int, bytes] = {}  # of the round that ends now; nothing when the run ends

    def describe(self) -> dict[str, dict[str, Any]]:
        return {"peers": {"rounds": self.clock.sequence}}

    def _join(self, caller: CallId, worker: int, is_chief: bool) -> Any:
        joined = super()._join(caller, worker, is_chief)
        return joined if joined is LATER else (*joined[:3], self._steps, self._weights)

    def _publish(self, caller: CallId, steps: int, weights: bytes) -> None:
        """The chief's weights after so many steps."""
        self._steps, self._weights = steps, weights
        self._load(caller, 0)

    def _gather(self, caller: CallId, push: dict[str, Any], given: bytes, wanted: list[int] | None) -> Any:
        self._given[push["worker"]], self._wanted[push["worker"]] = given, wanted
        return self._prepare(caller, push)

    def _commit(self, updates: list[Update]) -> None:
        self._round = {push.worker: self._given.pop(push.worker) for update in updates for push in update.pushes}
        super()._commit(updates)
        self._round = {}

    def _answer(self, worker: int, caller: CallId) -> None:
        wanted = self._wanted.pop(worker)
        found = {each: given for each, given in self._round.items() if wanted is None or each in wanted}
        self.service.reply(caller, (self.clock.get_clock(worker), self.clock.sequence, self._is_stopping, found))


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
        super().__init__(connection.index, connection.controller, connection.timeout_s, connection.keys)
        self.is_noticed = connection.is_noticed
        self.config, self.worker, self.num_workers = replica.config, connection.index, connection.num_workers
        self.weights = [each for group in replica.optimizer.param_groups for each in group["params"]]
        self._model, self._optimizer = replica.model, replica.optimizer
        self.steps = self.round = self._published = 0

    @abstractmethod
    def after_step(self) -> None:
        """Called after each step of this worker's optimiser."""

    def gather(self, tensors: Sequence[Tensor], workers: Collection[int] | None = None) -> dict[int, list[Tensor]]:
        """Give tensors, and wait until every worker that takes part has given its own.

        workers: whose tensors are needed; None: all, this worker's included

        Returns them by worker, on the CPU. One that has died or left is missing; when the run ends, all are.
        Raises TrainError when this worker was taken for dead.
        """
        began_s = time.perf_counter()
        push = Push(self._worker, self._incarnation, self._clock, self.round)
        wanted = None if workers is None else list(workers)
        self._pushes.send("gather", msgspec.to_builtins(push), _encode(tensors), wanted)
        answer = self._pushes.receive()
        if answer is None:
            raise TrainError(f"worker {self._worker} was taken for dead, and another has its place")
        self._clock, self.round, self._is_stopping, found = answer
        self.waited_s += time.perf_counter() - began_s
        return {worker: _decode(encoded) for worker, encoded in found.items()}

    def begin(self, step: int) -> int:
        joined = self._controller.call("join", self._worker, self.is_chief)
        self._incarnation, self._clock, self.round, self.steps, weights = joined
        if weights:
            self.load_weights(_decode(weights))
        else:
            self.steps = step
            self._publish()
        self._published = self.round
        return self.steps

    def load_weights(self, tensors: Sequence[Tensor]) -> None:
        """Put them into the model."""
        with torch.no_grad():
            for own, given in zip(self.weights, tensors, strict=True):
                own.copy_(given)

    def _publish(self) -> None:
        self._controller.call("publish", self.steps, _encode(self.weights))

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
            self._published = self.round
            self._publish()
        return self.steps

    def collect_state(self) -> None:
        """The chief's own weights and optimiser are saved."""


def _encode(tensors: Sequence[Tensor]) -> bytes:
    named = {f"{index:08}": each.detach().contiguous() for index, each in enumerate(tensors)}
    encoded: bytes = safetensors.torch.save(named)
    return encoded


def _decode(encoded: bytes) -> list[Tensor]:
    found = safetensors.torch.load(encoded)
    return [found[name] for name in sorted(found)]
