"""Local SGD and DiLoCo: workers take steps of their own, and exchange what they changed.

A round is `every` steps of a worker's own (inner) optimiser, from the weights that it pulled. Then it pushes the
change, pulled minus present weights, as if it were a gradient, and the servers take a step of the outer optimiser with
the mean of all workers. Local SGD: SGD of rate 1, which averages the weights (Stich, 1805.09767). DiLoCo: SGD with
Nesterov momentum (Douillard et al., 2311.08105, algorithm 1). A worker sends `every` times fewer bytes than with a push
after each step. `RoundClock` decides when changes are merged; a worker that is called pushes what it has.

With fragments, each part of the model has rounds of its own, at staggered steps, and a worker goes on with `delay`
steps before it uses what was merged: θ ← α θ + (1 - α) θ_merged (Streaming DiLoCo, 2501.18512, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.extend.sync import Connection, Replica, RpcClient
from shoal.libs.asynchronous.config import LocalStepsConfig
from shoal.libs.asynchronous.messages import WatchRound
from shoal.libs.asynchronous.parameter_server.partition import divide_fragments
from shoal.libs.asynchronous.parameter_server.worker import ParameterServerSync


class LocalStepsSync(ParameterServerSync):
    """A worker of a run with local steps. Its optimiser's state is its own, and that of the chief is saved.

    outer: the optimiser of the servers; it has their state after `collect_state`
    """

    def __init__(
        self,
        optimizer: Optimizer,
        spec: LocalStepsConfig,
        connection: Connection,
        get_step_weight: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.outer = outer = spec.make_server_optimizer(optimizer)
        super().__init__(outer, spec, connection, get_step_weight)
        self._inner = optimizer
        self._delay = spec.delay
        self._blend = spec.blend if spec.delay else 0.0  # the share of its own weights that a worker goes on with
        self._fragments = divide_fragments([each.numel() for each in self._parameters], spec.fragments)
        num = spec.fragments
        self._due = [spec.every * (index + 1) // num for index in range(num)]  # after so many steps of a cycle
        self._position = 0  # steps in this cycle
        self._fragment = 0  # which is exchanged next
        self._num_unsent = 0  # steps since the last push
        self._ages = [0.0] * num  # steps since the last push of each fragment, by their weights
        self._arrives_in: int | None = None  # steps until the merge of the fragment on its way is used
        self._pulled: list[Tensor] = []  # the weights from which changes count
        self._retained: list[Tensor] = []  # the worker's own weights, while the model has those of the servers
        self._calls: RpcClient | None = None  # answered when the round ends and this worker is to push what it has
        if spec.quorum is not None:
            self._calls = RpcClient(connection.controller, connection.timeout_s, keys=connection.keys)

    def begin(self, step: int) -> int:
        super().begin(step)
        self._pulled = [each.detach().clone() for each in self._parameters]
        self._begin_segment()
        return self._steps

    def _begin_segment(self) -> None:
        """The steps until the exchange of the fragment of this worker's round."""
        self._fragment = self._clock % len(self._fragments)
        self._position = self._due[self._fragment - 1] if self._fragment else 0
        if self._calls is not None:
            self._calls.send(WatchRound(self._clock))

    def before_step(self) -> None:
        """Go on with this worker's own weights after an evaluation or a save."""
        self._leave_if_noticed()
        if self._retained:
            with torch.no_grad():
                torch._foreach_copy_(tuple(self._parameters), self._retained)
            self._retained = []

    def before_evaluation(self) -> None:
        """The newest weights of the servers."""
        self._retain_own()
        self._pull(self._parameters)

    def apply_gradients(self) -> int:
        self._inner.step()
        self.num_steps += 1
        self._num_unsent += 1
        self._position += 1
        weight = self.get_step_weight()
        self._ages = [age + weight for age in self._ages]
        if self._arrives_in is not None:
            self._arrives_in -= 1
            if self._arrives_in == 0:
                self._use_merged()
        elif self._position >= self._due[self._fragment] or (self._calls is not None and self._calls.is_answered()):
            chosen = self._fragments[self._fragment]
            changes: list[Tensor | None] = [None] * len(self._parameters)
            for index in chosen:
                changes[index] = self._pulled[index] - self._parameters[index].detach()
            self._begin_push(changes, chosen, self._num_unsent, self._ages[self._fragment])
            self._ages[self._fragment], self._num_unsent = 0.0, 0
            self._arrives_in = self._delay
            if self._delay == 0:
                self._use_merged()
        return self._steps

    def _use_merged(self) -> None:
        """Wait for the merge of the fragment on its way, and go on with it."""
        chosen = self._fragments[self._fragment]
        self._finish_push()
        self._pull(self._pulled, chosen)
        with torch.no_grad():
            for index in chosen:
                self._parameters[index].lerp_(self._pulled[index], 1.0 - self._blend)
        self._arrives_in = None
        self._begin_segment()
        self._position += self._delay

    def collect_state(self) -> None:
        """The servers' weights and outer optimiser; the inner optimiser's state is this worker's own."""
        self._retain_own()
        super().collect_state()

    def _retain_own(self) -> None:
        if not self._retained:
            self._retained = [each.detach().clone() for each in self._parameters]

    def close(self) -> None:
        super().close()
        if self._calls is not None:
            self._calls.close()


def make_local_steps_sync(replica: Replica) -> LocalStepsSync:
    spec, model = cast(LocalStepsConfig, replica.config), replica.model
    return LocalStepsSync(replica.optimizer, spec, replica.require_connection(), lambda: float(model.step_weight))
