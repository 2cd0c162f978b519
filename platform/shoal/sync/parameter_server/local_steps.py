"""Local SGD and DiLoCo: workers take steps of their own, and exchange what they changed.

A round is `every` steps of a worker's own (inner) optimiser, from the weights that it pulled. Then it pushes the
change, pulled minus present weights, as if it were a gradient, and the servers take a step of the outer optimiser with
the mean of all workers. Local SGD: SGD of rate 1, which averages the weights (Stich, 1805.09767). DiLoCo: SGD with
Nesterov momentum (Douillard et al., 2311.08105, algorithm 1). A worker sends `every` times fewer bytes than with a push
after each step. Called by the launchers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from shoal.sync.parameter_server.clock import Settings
from shoal.sync.parameter_server.worker import ParameterServerSync
from shoal.sync.spec import SyncSpec


def make_outer_optimizer(inner: Optimizer, spec: SyncSpec) -> Optimizer:
    """The servers' optimiser, over the parameters of `inner` in their order."""
    parameters = [each for group in inner.param_groups for each in group["params"]]
    if spec.kind == "local_sgd":
        return SGD(parameters, lr=1.0)
    momentum = spec.outer_momentum
    return SGD(parameters, lr=spec.outer_learning_rate, momentum=momentum, nesterov=momentum > 0)


class LocalStepsSync(ParameterServerSync):
    """Worker `worker` of a run with local steps. Its optimiser's state is its own, and that of the chief is saved."""

    def __init__(
        self,
        optimizer: Optimizer,
        spec: SyncSpec,
        worker: int,
        controller: str,
        servers: Sequence[str],
        timeout_s: float,
    ) -> None:
        super().__init__(make_outer_optimizer(optimizer, spec), worker, controller, servers, timeout_s)
        self._inner, self._every = optimizer, spec.every
        self._num_local = 0  # steps in this round
        self._pulled: list[Tensor] = []

    def begin(self, step: int) -> int:
        return self._every * super().begin(step // self._every)

    def before_step(self) -> None:
        """Pull at the beginning of a round."""
        if self._num_local == 0:
            super().before_step()
            self._pulled = [each.detach().clone() for each in self._parameters]

    def apply_gradients(self) -> int:
        self._inner.step()
        self._num_local += 1
        if self._num_local == self._every:
            with torch.no_grad():
                for parameter, pulled in zip(self._parameters, self._pulled, strict=True):
                    parameter.grad = pulled - parameter
            super().apply_gradients()
            self._num_local = 0
        return self._every * self._steps

    def _get_settings(self) -> Settings:
        """The outer optimiser keeps its own."""
        return []

    def collect_state(self) -> None:
        """The weights of the servers; the optimiser's state is this worker's own. The outer momentum is not saved."""
        self.before_step()
