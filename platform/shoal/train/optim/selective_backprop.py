"""Selective Backprop (Jiang et al., arXiv:1910.00762): a backward pass for samples of high loss, a forward for all.

Owns the recent losses and the chosen samples that wait for a full batch. Called by the Trainer instead of
`ParallelModel.train_step`. A step takes one batch of candidates, so epochs, positions and schedules count as usual. The
weights change at steps at which a full batch of chosen samples is complete (about one in beta + 1); at the others there
are no gradients and the optimiser does nothing.

The benefit: fewer backward passes for the same accuracy, at the cost of a second forward pass of every chosen sample,
and of more candidates. Measured here, LeNet to 85% on Fashion-MNIST (batch 128, Adam, one thread, two seeds; without it
450 steps, 3.7 s of CPU): with beta 0.5, 412 backward passes over 650 batches, 7.4 s; with beta 1, 342 over 750, 7.6 s.
So a quarter fewer backward passes, and twice the time. It can win where the backward pass is expensive and most samples
are well learnt (the paper: late in training, large images), and where Task.sample_losses is written: the default calls
the loss once per sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.batch_tree import count_samples, map_tensors, slice_samples, tensors_of
from shoal.errors import ConfigError
from shoal.parallel.loss import get_value
from shoal.parallel.model import ParallelModel
from shoal.parallel.state.module_snapshot import eval_mode
from shoal.train.optim.ema import reshard_modules
from shoal.train.spec import SelectiveSpec, TrainSpec
from shoal.train.task import Task

_REMEDY = "write Task.sample_losses(outputs, batch), which gives the loss of each sample"


def count_profiled_steps(spec: TrainSpec) -> int:
    """The number of steps to profile: here, about one in beta + 1 has a backward pass."""
    chosen = spec.selective_backprop
    return 1 if chosen is None else 4 * math.ceil(chosen.beta + 1)


class SelectiveBackprop:
    """Chooses by loss, collects, and steps. Seeded; its state is in this rank's part of a checkpoint.

    Not for pipelines, where no rank sees both the samples and their losses.
    """

    def __init__(self, spec: SelectiveSpec, model: ParallelModel, task: Task, seed: int) -> None:
        self._spec = spec
        self._model = model
        self._task = task
        self._parameters = [parameter for _, parameter in model.named_parameters()]
        own_seed = (seed * 1_000_003 + model.data_rank) % 2**63  # equal on tensor peers; within torch's range
        self._random = torch.Generator().manual_seed(own_seed)
        self._recent = torch.empty(0)
        self._waiting: Any = None  # a batch of chosen samples, oldest first
        self._num_waiting = 0

    def train_step(self, batch: Any, step: int) -> Tensor:
        """Evaluate this rank's candidates; compute the gradients of a full batch of chosen ones, or none at all.

        Returns the mean loss over all candidates, detached, measured in evaluation mode. Collective.
        """
        size, module = count_samples(batch), self._model.modules[0]
        with torch.no_grad():  # without dropout, and without changing batch-norm statistics or the random state
            with eval_mode(module):
                outputs = module(*self._task.inputs(batch))
            reshard_modules([module])
            losses = _compute_sample_losses(self._task, outputs, batch, size).float()  # [B]
        chosen = self._choose(losses.cpu())
        new = map_tensors(batch, lambda tensor: tensor[chosen.to(tensor.device)])
        if self._waiting is not None:  # a checkpoint restores a named tuple as a plain one: take the form of `new`
            waiting = tensors_of(self._waiting)
            new = map_tensors(new, lambda tensor: torch.cat([next(waiting), tensor]))
        self._num_waiting = min(self._num_waiting + len(chosen), 2 * size)  # two batches wait for slower ranks
        self._waiting = map_tensors(new, lambda tensor: tensor[len(tensor) - self._num_waiting :])
        if self._is_batch_ready(size, losses):
            full = slice_samples(self._waiting, slice(size))
            self._waiting = slice_samples(self._waiting, slice(size, None))
            self._num_waiting -= size
            self._model.train_step(full, step)
        else:
            for parameter in self._parameters:
                parameter.grad = None
        return losses.mean()

    def state_dict(self) -> dict[str, Any]:
        """The recent losses, the waiting samples, and the random state."""
        return {"recent": self._recent, "waiting": self._waiting, "random": self._random.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from `state_dict`."""
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._recent, self._waiting = state["recent"], map_tensors(state["waiting"], lambda tensor: tensor.to(device))
        self._num_waiting = 0 if self._waiting is None else count_samples(self._waiting)
        self._random.set_state(state["random"])

    def _choose(self, losses: Tensor) -> Tensor:
        """The indices of the chosen candidates: each with probability (percentile of its loss) ** beta, section 3.1."""
        self._recent = torch.cat([self._recent, losses])[-self._spec.history :]
        ordered = self._recent.sort().values
        percentiles = torch.searchsorted(ordered, losses, right=True) / len(ordered)
        drawn = torch.rand(len(losses), generator=self._random)
        return (drawn < percentiles**self._spec.beta).nonzero().flatten()

    def _is_batch_ready(self, size: int, losses: Tensor) -> bool:
        """Whether every data rank has a full batch, since gradients are computed together."""
        is_ready = self._num_waiting >= size
        if self._model.num_data_ranks == 1:
            return is_ready
        ready = self._model.sum_over_data_ranks(losses.new_tensor([float(is_ready)]))
        return int(ready) == self._model.num_data_ranks


def _compute_sample_losses(task: Task, outputs: Any, batch: Any, size: int) -> Tensor:
    """[B]: from the Task, or by calling its `loss` for each sample. Raises ConfigError."""
    name = type(task).__name__
    losses = task.sample_losses(outputs, batch)
    if losses is None:
        if any(tensor.ndim == 0 or len(tensor) != size for tensor in tensors_of(outputs)):
            raise ConfigError("selective_backprop", name, "the model's outputs do not have a row a sample", _REMEDY)
        ones = [slice(index, index + 1) for index in range(size)]
        each = [task.loss(slice_samples(outputs, one), slice_samples(batch, one)) for one in ones]
        losses = torch.stack([get_value(loss) for loss in each])
    if losses.shape != (size,):
        problem = f"losses of {size} samples have the shape {tuple(losses.shape)}"
        raise ConfigError("selective_backprop", name, problem, _REMEDY)
    return losses
