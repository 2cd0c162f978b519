"""The synchronizer of a worker in elastic synchronous training: every step has the gradients of all that are alive.

Owns the worker's connections and its view of the run's memory. Called by the Trainer. All workers add up the same
gradients in the same order, and take the step with an optimiser of their own, so their weights are equal to the bit. On
another host than the memory, a worker sends its gradient with its push, and the answer has the sum.
"""

from __future__ import annotations

import time

import torch
from torch.optim import Optimizer

from shoal.errors import ConfigError, TrainError, WorkerDeparted
from shoal.extend.sync import Connection, Replica, StateAccess
from shoal.extend.train import list_parameters
from shoal.libs.asynchronous.clock import Push
from shoal.libs.asynchronous.controlled import ControlledSync
from shoal.libs.asynchronous.elastic_controller import (
    Depart,
    GetState,
    GiveState,
    JoinElastic,
    PrepareElastic,
    StateGiven,
    StepTaken,
)
from shoal.libs.asynchronous.messages import SetSteps
from shoal.libs.asynchronous.parameter_server.partition import describe_parameters
from shoal.libs.asynchronous.shared_memory import RunAddress, RunMemory, decode_state, encode_state, require_message


class ElasticSync(ControlledSync):
    """A worker of a run with `connection.num_workers` places."""

    def __init__(self, optimizer: Optimizer, state: StateAccess, connection: Connection) -> None:
        super().__init__(connection)
        self._optimizer, self._state = optimizer, state
        self._parameters = list_parameters(optimizer)
        for each in self._parameters:
            if each.dtype != torch.float32:
                problem = f"the model has a parameter of the type {each.dtype}, and workers that join add up float32"
                raise ConfigError("workers", f"[min, {connection.num_workers}]", problem, "use workers=N")
        self._sizes = [each.numel() for each in self._parameters]
        self._memory: RunMemory | None = None  # None on another host
        self._vector = torch.empty(0)  # [elements], float32: there, this worker's gradient
        self._version = 0
        self._is_taken = False

    def begin(self, step: int) -> int:
        """Join; on the chief, `step` counts when no worker has a state."""
        joined = self._pushes.call(JoinElastic(self._worker, describe_parameters(self._optimizer)))
        if joined is None:
            raise WorkerDeparted(f"worker {self._worker} came when the run ended, or was taken for dead", is_over=True)
        self._incarnation = joined.incarnation
        self._clock = joined.clock
        self._version = joined.version
        self._open_memory(joined.memory)
        if joined.has_state:
            if self._memory is None:
                self._state.load(decode_state(self._controller.call(GetState())))
            else:
                self._state.load(self._memory.read_state())
        else:
            self._version = self._controller.call(SetSteps(step))
        return self._version

    def _open_memory(self, address: RunAddress) -> None:
        try:
            self._memory = RunMemory.open(address)
        except OSError:
            self._vector = torch.empty(address.gradients.num_elements)

    def before_step(self) -> None:
        """Between two steps: leave, if that was asked for. Raises WorkerDeparted."""
        if not self._is_noticed():
            return
        if self._controller.call(Depart(self._worker)):  # no other worker could give the state
            self._controller.call(StateGiven(self._worker, True, self._write_state()))
        raise WorkerDeparted(f"worker {self._worker} left after step {self._version:,}")

    def before_evaluation(self) -> None:
        """The optimiser has put the weights there."""

    def combine_gradients(self) -> None:
        """Put into `.grad` the mean over the samples of all workers whose gradients the step has."""
        memory = self._memory
        gradients = [parameter.grad for parameter in self._parameters]
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            raise TrainError("workers that join add up dense gradients: use sparse=False, or workers=N")
        began_s = time.perf_counter()
        mine = self._vector if memory is None else memory.get_gradient(self._worker, self._version)
        for part, gradient in zip(mine.split(self._sizes), gradients, strict=True):
            if gradient is None:
                part.zero_()
            else:
                part.copy_(gradient.reshape(-1))
        factor, weight = self._state.get_weights()
        if factor != 1.0:
            mine *= factor
        absent = [index for index, gradient in enumerate(gradients) if gradient is None]
        push = Push(self._worker, self._incarnation, self._clock, self._version, absent=absent, weight=weight)
        sent = require_message(mine.numpy().tobytes()) if memory is None else None
        answer = self._pushes.call(PrepareElastic(push, sent))
        while isinstance(answer, GiveState):
            answer = self._pushes.call(StateGiven(self._worker, False, self._write_state()))
        if answer is None:
            self._end_as_lost()
        before = self._version
        self._version = answer.version
        self._clock = answer.clock
        self._is_stopping = answer.is_stopping
        self._is_taken = bool(answer.pushes)
        if self._is_taken:
            self._take_mean(answer, before)
        self.waited_s += time.perf_counter() - began_s

    def _take_mean(self, taken: StepTaken, version: int) -> None:
        if self._memory is None:
            total = torch.frombuffer(bytearray(taken.total), dtype=torch.float32)
        else:
            total = self._memory.add_up([worker for worker, _, _ in taken.pushes], version)
        total /= sum(weight for _, weight, _ in taken.pushes) or 1.0  # no sample may have counted
        absent = set.intersection(*(set(each) for _, _, each in taken.pushes))
        for index, part in enumerate(total.split(self._sizes)):
            parameter = self._parameters[index]
            parameter.grad = None if index in absent else part.view(parameter.shape).to(parameter.device)

    def apply_gradients(self) -> int:
        if self._is_taken:
            self._optimizer.step()
            self.num_steps += 1
        return self._version

    def _write_state(self) -> bytes | None:
        """Into the memory; on another host, for the controller to write it there."""
        if self._memory is None:
            return encode_state(self._state.get())
        self._memory.write_state(self._state.get())
        return None

    def collect_state(self) -> None:
        """The chief has all of it."""

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        super().close()


def make_elastic_sync(replica: Replica) -> ElasticSync:
    return ElasticSync(replica.optimizer, replica.state, replica.require_connection())
