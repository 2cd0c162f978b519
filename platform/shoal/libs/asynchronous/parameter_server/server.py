"""A server of asynchronous training: a part of the weights, and of what the optimiser stores for it.

It *applies*: a worker sends a gradient and never the optimiser's state, and the weights of a version exist before any
worker asks for them. Updates come in one order, the same on every server, so version v is the same moment everywhere.
Called by the process that serves it; knows no sockets. Elements are float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import ConfigError
from shoal.extend.train import list_parameters
from shoal.libs.asynchronous.clock import Push, Settings, Update
from shoal.libs.asynchronous.config import ServersConfig
from shoal.libs.asynchronous.parameter_server.partition import NUMBER, describe_parameters, plan_partition, take_part
from shoal.libs.asynchronous.shared_memory import SharedWeights

LATE, LATE_WEIGHTS = "late", "late_weights"  # in a dump: [size], and for each piece
SETTINGS = ("lr", "momentum", "betas")  # of an optimiser's group, that a schedule may change


class ParameterServer:
    """Server `index` of `spec.servers`.

    optimizer: over all parameters of the model, as one process would have it; its class and settings are used
    """

    def __init__(self, index: int, optimizer: Optimizer, spec: ServersConfig, num_workers: int) -> None:
        self.index, partition = index, plan_partition(optimizer, spec.servers)
        self.parameters = describe_parameters(optimizer)
        self._pieces, self.spec = partition.pieces[index], spec
        size = partition.get_size(index)
        self.memory = SharedWeights.create(size, num_workers)
        self._weights, self._gradient = torch.zeros(size), torch.zeros(size)
        self._optimizer = take_part(optimizer, partition, index, self._weights)
        self._views = list_parameters(self._optimizer)
        by_place = {view.data_ptr(): view for view in self._views}
        self._views = [by_place[self._weights[piece.offset :].data_ptr()] for piece in self._pieces]
        self._pulled: dict[int, Tensor] = {}  # by worker, where staleness is compensated
        self.version = -1  # no weights yet
        self._waiting: dict[int, Update] = {}  # updates that came before an earlier one
        self._late = torch.empty(0)  # [size] once there is a late gradient: their sum, weighted
        self._late_weights = [0.0] * len(self._pieces)

    def commit(self, update: Update) -> None:
        """Apply an update once all earlier ones are applied."""
        if update.sequence <= self.version:  # of an earlier life
            return
        self._waiting[update.sequence] = update
        while (following := self._waiting.pop(self.version + 1, None)) is not None:
            self._apply(following)

    def remember_pull(self, worker: int, weights: Tensor) -> None:
        """A worker computes its next gradient with these."""
        if self.spec.delay_compensation:
            self._pulled[worker] = weights.clone()

    @property
    def weights(self) -> Tensor:
        """[size]: of `version`."""
        return self._weights

    def copy_weights(self) -> bytes:
        return self._weights.numpy().tobytes()

    def _apply(self, update: Update) -> None:
        first, *others = update.pushes
        absent = set(first.absent).intersection(*(push.absent for push in others))
        present = [index for index, piece in enumerate(self._pieces) if piece.parameter not in absent]
        if update.is_late:
            if not len(self._late):
                self._late = torch.zeros_like(self._weights)
            gradient = self._compensate(first)
            for index in present:
                self._slice(self._late, index).add_(self._slice(gradient, index), alpha=first.weight)
                self._late_weights[index] += first.weight
        else:
            gradient = self._average(update.pushes, present)
            for view in self._views:
                view.grad = None
            for index in present:
                self._views[index].grad = self._slice(gradient, index).view(self._views[index].shape)
            self._use_settings(first.settings, max(update.staleness))
            self._optimizer.step()
        self.version = update.sequence
        self.memory.publish(self._weights, self.version)

    def _average(self, pushes: list[Push], present: list[int]) -> Tensor:
        """The mean of the gradients by their weights, and of those that came too late for the last update."""
        first, *others = pushes
        gradient = self._compensate(first)  # where a worker wrote it: it writes there again only after this step
        has_late = any(self._late_weights[index] for index in present)
        if not others and not has_late:
            return gradient
        # So that equal weights are 1, and the mean to the bit the plain one. No sample may have counted in any.
        unit = max(push.weight for push in pushes) or 1.0
        gradient = self._gradient.copy_(gradient).mul_(first.weight / unit)
        for push in others:
            gradient.add_(self._compensate(push), alpha=push.weight / unit)
        total = sum(push.weight / unit for push in pushes)
        if not has_late:
            return gradient.div_(total or 1.0)
        for index in present:
            late, part = self._slice(self._late, index), self._slice(gradient, index)
            part.add_(late, alpha=1 / unit).div_(total + self._late_weights[index] / unit or 1.0)
            late.zero_()
            self._late_weights[index] = 0.0
        return gradient

    def _slice(self, vector: Tensor, index: int) -> Tensor:
        """The piece of this index."""
        piece = self._pieces[index]
        return vector[piece.offset : piece.offset + piece.size]

    def _compensate(self, push: Push) -> Tensor:
        """DC-ASGD, equation 10: the gradient at the present weights, by a diagonal approximation of the Hessian."""
        gradient = self.memory.gradients[push.worker]
        before = self._pulled.get(push.worker)
        if before is None:
            return gradient
        return gradient + self.spec.delay_compensation * gradient.square() * (self._weights - before)

    def _use_settings(self, settings: Settings, staleness: int) -> None:
        if not settings:  # its own
            return
        rate = self.spec.scale_rate(staleness)
        for group in self._optimizer.param_groups:
            chosen = settings[group[NUMBER]]
            group.update({name: tuple(value) if name == "betas" else value for name, value in chosen.items()})
            group["lr"] *= rate

    # -- state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Begin with a `dump`."""
        self._weights.copy_(state["weights"])
        self._optimizer.state.clear()
        for index, view in enumerate(self._views):
            prefix = f"{index}."
            values = {name.removeprefix(prefix): each for name, each in state.items() if name.startswith(prefix)}
            if values:
                self._optimizer.state[view] = {
                    name: each.view(view.shape) if each.ndim else each for name, each in values.items()
                }
        if LATE in state:
            self._late, self._late_weights = state[LATE].clone(), state[LATE_WEIGHTS].tolist()
        self.version = int(state["version"])
        self.memory.publish(self._weights, self.version)

    def set_version(self, version: int) -> None:
        """Take the present weights for those of `version`: updates before it that this server lacks are lost."""
        if version != self.version:
            self.version = version
            if version >= 0:
                self.memory.publish(self._weights, version)
        self._waiting = {sequence: update for sequence, update in self._waiting.items() if sequence > version}

    def dump(self) -> dict[str, Tensor]:
        """`version`, `weights` [size], and `INDEX.NAME`: what the optimiser stores for each piece. Not copied.

        With late gradients, which the next update takes in, also their sum and weights.
        """
        state = {"version": torch.tensor(self.version), "weights": self._weights}
        if any(self._late_weights):
            state |= {LATE: self._late, LATE_WEIGHTS: torch.tensor(self._late_weights, dtype=torch.double)}
        for index, view in enumerate(self._views):
            values = self._optimizer.state.get(view, {})
            for name, value in values.items():
                if not isinstance(value, Tensor):
                    problem = f"stores {name!r} as a {type(value).__name__}, and only tensors can be divided and saved"
                    raise ConfigError(
                        "sync.kind", "parameter_server", f"the optimiser {problem}", "use sync=all_reduce"
                    )
            state |= {f"{index}.{name}": each.reshape(-1) if each.ndim else each for name, each in values.items()}
        return state

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self.memory.close()
