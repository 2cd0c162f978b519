"""The controller of elastic synchronous training: whose gradients a step has, and who gives a new worker its state.

Owns the membership and the run's memory. The order of steps is the `Clock`'s with staleness 0: a step is taken by all
that take part or by none, at the moment when this process decides so. By then the gradients lie in memory that no
worker owns, so the death of a worker afterwards takes nothing from the others. For workers of other hosts this process
writes their gradients there, adds them all up in the order in which the others do, and reads and writes the state.

    a worker joins ► no step is taken without it ► one that waits writes its state ► the new one reads it ► it pushes

While a worker has no state yet, no step can be taken, so the state that is written is that of all. When no worker has a
state, worker 0 begins with the newest checkpoint, and the others take its state: the restart of the whole group.
"""

from __future__ import annotations

import math
from typing import Any, cast

import msgspec
import numpy as np

from shoal.errors import TrainError
from shoal.extend.sync import LATER, CallId, Request, SyncConfig, answers
from shoal.libs.asynchronous.clock import Clock, Push, Update
from shoal.libs.asynchronous.config import ElasticConfig
from shoal.libs.asynchronous.controller import Controller, ControllerSetting
from shoal.libs.asynchronous.messages import SetSteps, StopRun
from shoal.libs.asynchronous.shared_memory import RunAddress, RunMemory, require_message

CHIEF = 0


class Admitted(msgspec.Struct, frozen=True, array_like=True):
    """A worker begins, with the state of `version` in the memory if `has_state`, or with that of a checkpoint."""

    incarnation: int
    clock: int
    version: int
    has_state: bool
    memory: RunAddress


class JoinElastic(Request[Admitted | None], frozen=True):
    """A worker with parameters of these shapes; answered when it may begin. None: it came when the run ended."""

    worker: int
    shapes: list[list[int]]


class StepTaken(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The step's pushes: worker, weight, parameters without a gradient. None are there when the run ends.

    total: for a worker that has sent its gradient: the sum of those of the pushes, [elements], float32
    """

    version: int
    clock: int
    is_stopping: bool
    pushes: list[tuple[int, float, list[int]]]
    total: bytes = b""


class GiveState(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to a push: write your state, then ask again."""


class PrepareElastic(Request[StepTaken | GiveState | None], frozen=True):
    """A gradient is in the memory. None: the worker was taken for dead.

    gradient: of a worker that cannot open the memory, [elements], float32; None: it is there
    """

    push: Push
    gradient: bytes | None = None


class StateGiven(Request[StepTaken | GiveState | None], frozen=True):
    """The worker has written its state. Answered as its push, unless it leaves now.

    state: of a worker that cannot open the memory; None: it is there
    """

    worker: int
    leaves: bool
    state: bytes | None = None


class GetState(Request[bytes], frozen=True):
    """Of a worker that was admitted with a state, and cannot open the memory."""


class Depart(Request[bool], frozen=True):
    """A worker leaves between two steps. Answers whether it has to write its state first, which no other has."""

    worker: int


class ElasticController(Controller):
    """One run's.

    num_restarts: how often the group began with a checkpoint, as no worker had a state
    num_healed:   workers that took the state of another
    """

    def __init__(self, run: ControllerSetting, clock: Clock) -> None:
        self._num_slots = clock.num_workers
        self._shapes: list[list[int]] | None = None
        self._memory: RunMemory | None = None
        self._unhealed: dict[int, CallId] = {}  # workers that have joined, and wait for a state
        self._healed: set[int] = set()  # those that have the state, or may read it now
        self._donor: int | None = None  # the worker that writes its state
        self._writing = b""  # its identity: of another life of this worker, a state comes too late
        self._owed: StepTaken | None = None  # the donor's answer, when its step was taken meanwhile
        self._given_at = self._giving_at = -1  # steps that are in the state in memory; in the one that is written
        self._pushes: list[tuple[int, float, list[int]]] = []  # of the step that is taken now: worker, weight, absent
        self._senders: set[int] = set()  # workers whose gradients came in messages
        self._total = b""  # of the step that is taken now, once one of them needs it
        self.num_restarts = self.num_healed = 0
        super().__init__(run, clock)

    def describe(self) -> dict[str, dict[str, Any]]:
        return {"elastic": {"healed": self.num_healed, "restarts": self.num_restarts - 1}}

    def close(self) -> None:
        super().close()
        if self._memory is not None:
            self._memory.close()

    # -- joining

    @answers(JoinElastic)
    def join_elastic(self, caller: CallId, request: JoinElastic) -> object:
        worker, shapes = request.worker, request.shapes
        if self._memory is None:
            self._shapes = shapes
            self._memory = RunMemory.create(sum(map(math.prod, shapes)), self._num_slots)
        if shapes != self._shapes:
            raise TrainError(
                "has parameters of other shapes than the others': every worker needs the same Task and args"
            )
        if self._is_stopping:
            if worker == CHIEF:
                raise TrainError("died while it ended the run: resume the run, from its newest checkpoint")
            return None
        self._incarnations[worker] = self.clock.join(worker)
        self._unhealed[worker] = caller
        self._heal()
        return LATER

    def _heal(self) -> None:
        """Let those without a state begin, or have a state written for them."""
        if not self._unhealed or self._donor is not None:
            return
        if self._given_at == self.clock.sequence:
            for worker, caller in self._unhealed.items():
                self._admit(worker, caller, has_state=True)
            self._healed |= self._unhealed.keys()
            self.num_healed += len(self._unhealed)
            self._unhealed.clear()
        elif not self._healed:
            if CHIEF in self._unhealed:
                self._admit(CHIEF, self._unhealed.pop(CHIEF), has_state=False)
        elif donors := sorted(self._healed & self._waiting.keys()):
            self._donor, self._giving_at = donors[0], self.clock.sequence
            self._writing = self._waiting[donors[0]].identity
            self.service.reply(self._waiting[donors[0]], GiveState())

    def _admit(self, worker: int, caller: CallId, *, has_state: bool) -> None:
        assert self._memory is not None
        incarnation, clock = self._incarnations[worker], self.clock.get_clock(worker)
        self.service.reply(caller, Admitted(incarnation, clock, self.clock.sequence, has_state, self._memory.address))

    def set_steps(self, caller: CallId, request: SetSteps) -> int:
        """The chief begins after so many steps, with a state that the others take."""
        self.clock.resume(request.steps)
        self._has_weights, self._given_at = True, -1
        self._healed.add(CHIEF)
        self.num_restarts += 1
        self._heal()
        return request.steps

    @answers(GetState)
    def get_state(self, caller: CallId, request: GetState) -> bytes:
        assert self._memory is not None
        return require_message(self._memory.state_file.read_bytes())

    @answers(StateGiven)
    def take_state(self, caller: CallId, request: StateGiven) -> object:
        if caller.identity != self._writing:
            return None  # it was taken for dead
        if request.state is not None:
            assert self._memory is not None
            self._memory.state_file.write_bytes(request.state)
        self._donor, self._given_at = None, self._giving_at
        if request.leaves:
            self._leave(request.worker)
            return None
        owed, self._owed = self._owed, None
        if owed is None:
            self._waiting[request.worker] = caller
        self._heal()
        return LATER if owed is None else owed

    # -- steps

    @answers(PrepareElastic)
    def prepare_elastic(self, caller: CallId, request: PrepareElastic) -> object:
        push, sent = request.push, request.gradient
        self._senders.discard(push.worker)
        if sent is not None and self._incarnations.get(push.worker) == push.incarnation:
            assert self._memory is not None
            self._memory.get_gradient(push.worker, push.version).numpy()[:] = np.frombuffer(sent, np.float32)
            self._senders.add(push.worker)
        answer = self._take_push(caller, push)
        self._heal()
        return answer

    def _commit(self, updates: list[Update]) -> None:
        self._pushes = [(each.worker, each.weight, each.absent) for update in updates for each in update.pushes]
        super()._commit(updates)
        self._pushes, self._total = [], b""

    def _answer(self, worker: int, caller: CallId) -> None:
        """The pushes of the step that is taken; none when the run ends."""
        if worker in self._senders and self._pushes and not self._total:
            assert self._memory is not None
            added = self._memory.add_up([each for each, _, _ in self._pushes], self.clock.sequence - 1)
            self._total = added.numpy().tobytes()
        total = self._total if worker in self._senders else b""
        answer = StepTaken(self.clock.sequence, self.clock.get_clock(worker), self._is_stopping, self._pushes, total)
        if worker == self._donor:
            self._owed = answer
        else:
            self.service.reply(caller, answer)

    # -- leaving

    @answers(Depart)
    def depart(self, caller: CallId, request: Depart) -> bool:
        if self._healed == {request.worker} and self._given_at != self.clock.sequence:
            self._donor = request.worker
            self._giving_at = self.clock.sequence
            self._writing = caller.identity
            return True
        self._leave(request.worker)
        return False

    def _leave(self, worker: int) -> None:
        if worker == self._donor:
            self._donor = self._owed = None
            self._writing = b""
        if worker in self._unhealed:
            self.service.reply(self._unhealed.pop(worker), None)
        self._healed.discard(worker)
        super()._leave(worker)
        self._heal()

    def stop_run(self, caller: CallId, request: StopRun) -> None:
        super().stop_run(caller, request)
        for waiting in self._unhealed.values():
            self.service.reply(waiting, None)
        self._unhealed.clear()


def make_elastic_controller(config: SyncConfig, run: ControllerSetting) -> ElasticController:
    clock = Clock(run.num_workers, min_workers=cast(ElasticConfig, config).min_workers)
    return ElasticController(run, clock)
