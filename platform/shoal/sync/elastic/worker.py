"""The synchronizer of a worker in elastic synchronous training: every step has the gradients of all that are alive.

Owns the worker's connections and its view of the run's memory. Called by the Trainer. All workers add up the same
gradients in the same order, and take the step with an optimiser of their own, so their weights are equal to the bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from shoal.errors import ConfigError, TrainError, WorkerDeparted
from shoal.sync.elastic.controller import CHIEF, GIVE
from shoal.sync.elastic.run_memory import RunAddress, RunMemory
from shoal.sync.parameter_server.clock import Push
from shoal.sync.parameter_server.partition import describe_parameters
from shoal.sync.parameter_server.rpc import CurveKeys, RpcClient
from shoal.sync.rank_signals import RankSignals
from shoal.sync.synchronizer import Synchronizer

EXCHANGE_S = 0.25  # between two exchanges of signals


@dataclass(frozen=True)
class ReplicaState:
    """What a worker gives to one that joins, and how its present gradients count.

    get, load:   weights, buffers, optimiser and counters
    get_weights: (factor of this worker's gradients, their weight): a step divides the sum of all workers' gradients, by
                 their factors, by the sum of the weights
    """

    get: Callable[[], dict[str, Any]]
    load: Callable[[dict[str, Any]], None]
    get_weights: Callable[[], tuple[float, float]]


class ElasticSync(Synchronizer):
    """Worker `worker` of a run with `num_workers` places; the chief, which evaluates, saves and reports, is worker 0.

    is_noticed: whether this worker is to leave, before its next step
    """

    def __init__(
        self,
        optimizer: Optimizer,
        state: ReplicaState,
        worker: int,
        num_workers: int,
        controller: str,
        timeout_s: float,
        keys: CurveKeys | None = None,
        is_noticed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._optimizer, self._state, self._num_workers, self._is_noticed = optimizer, state, num_workers, is_noticed
        self._parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for each in self._parameters:
            if each.dtype != torch.float32:
                problem = f"the model has a parameter of the type {each.dtype}, and workers that join add up float32"
                raise ConfigError("workers", f"[min, {num_workers}]", problem, "use workers=N")
        self._sizes = [each.numel() for each in self._parameters]
        self._worker, self.is_chief = worker, worker == CHIEF
        self._controller = RpcClient(controller, timeout_s, keys=keys)
        self._pushes = RpcClient(controller, timeout_s, keys=keys)  # whose answer may be awaited for long
        self._memory: RunMemory | None = None
        self._incarnation = self._clock = self._version = 0
        self._is_stopping = self._is_taken = False
        self._exchanged_s = time.monotonic()
        self.num_steps = 0  # of this worker
        self.waited_s = 0.0

    def begin(self, step: int) -> int:
        """Join; on the chief, `step` counts when no worker has a state."""
        joined = self._pushes.call("join", self._worker, describe_parameters(self._optimizer))
        if joined is None:
            raise WorkerDeparted(f"worker {self._worker} came when the run ended, or was taken for dead", is_over=True)
        self._incarnation, self._clock, self._version, has_state, address = joined
        self._memory = RunMemory.open(msgspec.convert(address, RunAddress))
        if has_state:
            self._state.load(self._memory.read_state())
        else:
            self._version = self._controller.call("load", step)
        return self._version

    def before_step(self) -> None:
        """Between two steps: leave, if that was asked for. Raises WorkerDeparted."""
        if not self._is_noticed():
            return
        if self._controller.call("depart", self._worker):  # no other worker could give the state
            self._write_state()
            self._controller.call("give", self._worker, True)
        raise WorkerDeparted(f"worker {self._worker} left after step {self._version:,}")

    def before_evaluation(self) -> None:
        """The optimiser has put the weights there."""

    def combine_gradients(self) -> None:
        """Put into `.grad` the mean over the samples of all workers whose gradients the step has."""
        assert self._memory is not None
        found = [parameter.grad for parameter in self._parameters]
        if any(gradient is not None and gradient.is_sparse for gradient in found):
            raise TrainError("workers that join add up dense gradients: use sparse=False, or workers=N")
        began_s = time.perf_counter()
        mine = self._memory.get_gradient(self._worker, self._version)
        for part, gradient in zip(mine.split(self._sizes), found, strict=True):
            if gradient is None:
                part.zero_()
            else:
                part.copy_(gradient.reshape(-1))
        factor, weight = self._state.get_weights()
        if factor != 1.0:
            mine *= factor
        absent = [index for index, gradient in enumerate(found) if gradient is None]
        key = self._worker, self._incarnation, self._clock, self._version
        self._pushes.send("prepare", msgspec.to_builtins(Push(*key, absent=absent, weight=weight)))
        while (answer := self._pushes.receive()) == GIVE:
            self._write_state()
            self._pushes.send("give", self._worker, False)
        if answer is None:
            raise TrainError(f"worker {self._worker} was taken for dead, and another has its place")
        before = self._version
        self._version, self._clock, self._is_stopping, pushes = answer
        self._is_taken = bool(pushes)
        if self._is_taken:
            self._take_mean(pushes, before)
        self.waited_s += time.perf_counter() - began_s

    def _take_mean(self, pushes: list[tuple[int, float, list[int]]], version: int) -> None:
        assert self._memory is not None
        total = torch.zeros_like(self._memory.get_gradient(self._worker, version))
        for worker, _, _ in pushes:
            total += self._memory.get_gradient(worker, version)
        total /= sum(weight for _, weight, _ in pushes) or 1.0  # no sample may have counted
        absent = set.intersection(*(set(each) for _, _, each in pushes))
        for index, part in enumerate(total.split(self._sizes)):
            parameter = self._parameters[index]
            parameter.grad = None if index in absent else part.view(parameter.shape).to(parameter.device)

    def apply_gradients(self) -> int:
        if self._is_taken:
            self._optimizer.step()
            self.num_steps += 1
        return self._version

    def _write_state(self) -> None:
        assert self._memory is not None
        self._memory.write_state(self._state.get())

    def is_exchange_due(self) -> bool:
        return self._is_stopping or time.monotonic() - self._exchanged_s > EXCHANGE_S

    def exchange(self, mine: RankSignals) -> RankSignals:
        self._exchanged_s = time.monotonic()
        return RankSignals(*self._controller.call("exchange", self._worker, self.is_chief, tuple(mine)))

    def collect_state(self) -> None:
        """The chief has all of it."""

    def end(self) -> None:
        """The chief has decided that the run ends."""
        if self.is_chief:
            self._controller.call("stop")
        else:
            self._controller.call("leave", self._worker)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        self._controller.close()
        self._pushes.close()
