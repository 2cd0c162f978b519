"""The Trainer's view of a model, however it is parallelised: one interface, one implementation for each plan.

The rule for every implementation: after `train_step` the gradients are those of the mean loss over the *global* batch,
as one process would compute them. Called by the Trainer; knows no optimiser's schedule, no file and no record.

Every plan divides its batches into micro-batches here.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from shoal.batch_tree import count_samples, map_tensors, slice_samples
from shoal.errors import PlanError
from shoal.parallel.loss import Loss, Mean, require_loss
from shoal.parallel.loss_trace import LossReader


def split_micro_batches(batch: Any, parts: int, *, is_even: bool = True) -> list[Any]:
    """`batch` as `parts` micro-batches of equal size; micro-batch m takes every `parts`-th sample, from the m-th.

    Ranks have contiguous shares of a global batch. With this stride, the micro-batches m of all ranks together are the
    samples m, m + parts, ... of the global batch, in order: the same for any number of ranks, so that batch statistics
    and dropout masks of a micro-batch equal those of one process.

    is_even: False: the last micro-batches may have one sample less

    Raises PlanError when the samples cannot be divided.
    """
    if parts == 1:
        return [batch]
    size = count_samples(batch)
    if size < parts or (is_even and size % parts):
        problem = f"cannot be divided into {parts} micro-batches"
        raise PlanError("batch_size", size, problem, "change batch_size, accumulate or micro_batches")
    strided = [slice_samples(batch, slice(first, None, parts)) for first in range(parts)]
    return [map_tensors(each, Tensor.contiguous) for each in strided]  # a Task may take a `view` of its labels


def iter_chunks(batch: Any, parts: int) -> Iterator[tuple[Any, float]]:
    """At most `parts` contiguous pieces of any batch, each with its share of the samples."""
    size = count_samples(batch)
    each = max(1, -(-size // parts))
    for begin in range(0, size, each):
        end = min(size, begin + each)
        yield slice_samples(batch, slice(begin, end)), (end - begin) / size


class TaskProtocol(Protocol):
    """A plan's view of a Task: the model's inputs from a batch, and the results from its outputs."""

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """The positional arguments of the model."""
        ...

    def loss(self, outputs: Any, batch: Any) -> Loss:
        """Scalar: the mean over the samples of the batch; or over something else, as a `Mean` or a mean of torch's."""
        ...

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Loss]:
        """Scalars, each a mean over the samples of the batch; or `Mean`s."""
        ...

    def tensor_plan(self) -> dict[str, str] | None:
        """How layers are split between tensor ranks, by pattern of their names; None: derived from their types."""
        ...

    def pipeline_cuts(self) -> list[str] | None:
        """The names of the modules that begin the stages after the first; None: chosen by measurement."""
        ...


def compute_loss_and_metrics(learnable: TaskProtocol, outputs: Any, batch: Any) -> dict[str, Loss]:
    """The `loss` and each metric, also those of shape [1] as scalars.

    A Task with a `train_step` need not have a `loss`.
    """
    metrics: dict[str, Loss] = {
        name: value if isinstance(value, Mean) else value.reshape(())
        for name, value in learnable.metrics(outputs, batch).items()
    }
    if getattr(learnable, "has_loss", True):
        return {"loss": require_loss(learnable.loss(outputs, batch)), **metrics}
    return metrics


def copy_task(learnable: TaskProtocol) -> TaskProtocol:
    """What counts for itself: in its numbers, lists, dicts and small tensors; other objects are shared."""
    copied = copy.copy(learnable)
    own = tree_map_only(Tensor, lambda each: each.clone() if each.numel() < 1 << 20 else each, vars(copied))
    vars(copied).update(own)
    return copied


Observer = Callable[[Any, Any], None]


class ParallelModel(ABC):
    """A model on this rank.

    modules:        the modules on this rank: the model, its stage, or its several stages
    data_rank:      the index of this rank's share of each global batch, of `num_data_ranks`; ranks that split layers or
                    stages among themselves get the same share
    loss_reader:    what finds out what the loss divides by
    """

    modules: list[nn.Module]
    data_rank: int
    num_data_ranks: int
    loss_reader: LossReader
    forward_dtype: torch.dtype | None = None  # of the weights in a forward pass, if it is not that of the parameters
    step_weight: Tensor | float = 1.0  # of the newest step's loss and gradients in a mean over steps or replicas
    step_losses: Mapping[str, Tensor] = MappingProxyType({})  # further losses of the newest step, by the Task's names

    @abstractmethod
    def train_step(self, batch: Any, step: int, share: float = 1.0) -> Tensor:
        """Forward and backward over this rank's share of a global batch; gradients are cleared first.

        share: how many samples this rank has, relative to an equal division of the global batch (`relative_share` of a
               loader): the weight of its mean loss. Raises PlanError for another than 1 if the plan needs equal shares

        `step` seeds random operations (dropout masks): the same step gives the same masks, whatever the plan.
        Returns the mean loss of the share times `share`, detached; a zero on a rank without the last stage.
        Collective. Afterwards `.grad` of each parameter (of this rank's part of it) is the gradient of the mean loss
        over the global batch; None for a parameter that no rank used.

        If the loss is a `Mean`, the share's total is divided by the mean count of the ranks, so that the mean over
        ranks is that of the global batch, and `step_weight` is this count for each sample of an equal division.
        """

    @abstractmethod
    def evaluate(
        self, batch: Any, num_samples: int, observe: Observer | None = None, is_trial: bool = False
    ) -> dict[str, Tensor]:
        """[2] each: sum and count of `loss` and each metric over this rank's share; no gradients. Collective.

        observe: receives the outputs and their part of the batch, where this rank has them
        is_trial: in full precision, of a batch that is not split, by a copy of the Task, with nothing for ranks without
                  the last stage

        A share may be smaller than others', or empty (`num_samples` 0: `batch` is then any batch, and is not counted).
        """

    @abstractmethod
    def measure_loss(self, batch: Any) -> dict[str, Tensor]:
        """The loss of a batch that is not split, in evaluation mode and full precision: see `loss_trace.measure`.
        Nothing on ranks without the last stage. Collective."""

    @abstractmethod
    def sum_over_data_ranks(self, values: Tensor) -> Tensor:
        """The element-wise sum of `values` over the data ranks, sent to all ranks. Collective."""

    @abstractmethod
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before. Collective."""

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, under their names in the full model; a tied one once."""

    @abstractmethod
    def model_state(self) -> dict[str, Any]:
        """Parameters and persistent buffers by their names in the full model; DTensors if they are split."""

    @abstractmethod
    def load_model_state(self, state: dict[str, Any]) -> None:
        """Load a `model_state` that a checkpoint has filled."""

    @abstractmethod
    def optimizer_state(self, optimizer: Optimizer, *, to_fill: bool = False) -> dict[str, Any]:
        """The optimiser's state by parameter name, for any other plan; missing entries as its first step creates them.

        to_fill: the optimiser keeps the created entries, for loading a checkpoint into them
        """

    @abstractmethod
    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load an `optimizer_state` that a checkpoint has filled."""

    def loss_scale_state(self) -> dict[str, float]:
        """The present scale of an fp16 loss, the same on every rank; {} in another precision."""
        return {}

    def load_loss_scale_state(self, state: dict[str, float]) -> None:  # noqa: B027 - most precisions have nothing to do
        """Load a `loss_scale_state`, of any plan and precision."""

    @abstractmethod
    def describe_full_weights(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Dtype and shape of each tensor of the full model's state, of which none is gathered."""

    @abstractmethod
    def iter_full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `describe_full_weights`, gathered one by one, on the CPU of rank 0; nothing elsewhere.

        They may be the model's own: copy what you retain. Collective: every rank exhausts it.
        """

    def full_weights(self) -> dict[str, Tensor]:
        """A copy of the full model's state on the CPU, on rank 0; {} elsewhere. Collective."""
        return {name: each.clone() for name, each in self.iter_full_weights()}

    @abstractmethod
    def check_buffers(self) -> None:
        """Raises PlanError, on all data ranks or none, when a persistent buffer differs between them. Collective."""

    @property
    def communication_s(self) -> float:
        """Seconds that `train_step` has waited for other ranks so far; NaN if the plan cannot measure it."""
        return float("nan")

    @property
    def shm_sent_bytes(self) -> float:
        """Bytes sent by this rank without torch.distributed so far, counted as a ring would send them."""
        return 0.0

    @property
    def shared_memory(self) -> list[Tensor]:
        """Tensors in memory that ranks of a host share for communication, which belongs to no single rank."""
        return []

    @property
    def busy_by_stage(self) -> dict[tuple[int, str], float]:
        """Computing seconds of each of this rank's pipeline stages, forward and backward, so far; {} without."""
        return {}

    @property
    def scheduled_s(self) -> float:
        """Seconds of the pipeline's schedules so far; NaN without a pipeline."""
        return float("nan")

    def on_optimizer_step(self) -> None:  # noqa: B027 - most plans have nothing to do
        """Called after each step of the optimiser, for plans with copies of a parameter."""

    def close(self) -> None:  # noqa: B027 - most plans have nothing to do
        """Release the plan's resources other than the modules. Idempotent."""
