"""Data parallel: each rank has the full model and a share of the batch, and gradients are averaged.

By PyTorch's DistributedDataParallel as they appear; between CPU ranks of one host all at once, see `FlatGradients`.
Buffers are not broadcast: running statistics of batch normalisation are equal on every rank, and other buffers that
training changes must be, see `batch_norm` and `rank_consistency`. Called by `parallelize`.

FlatGradients replaces DistributedDataParallel where `ShmAllReduce` computes the sums: all gradients of a replica lie in
one buffer, averaged over the ranks of a host in one sum after the backward pass. The computing thread does that itself,
so buckets, which overlap sending and computing, would only add cost. Also for a Task's own steps, which may call parts
of the model.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal.errors import PlanError
from shoal.parallel.comm.collective_timer import make_waits
from shoal.parallel.comm.shm_all_reduce import ShmAllReduce
from shoal.parallel.comm.world import World
from shoal.parallel.layers.batch_norm import globalise_batch_norm
from shoal.parallel.layers.compile import compile_module
from shoal.parallel.loss import get_value
from shoal.parallel.model import TaskProtocol, split_micro_batches
from shoal.parallel.spec import ParallelSpec
from shoal.parallel.spmd.base import SpmdModel
from shoal.parallel.state.module_snapshot import preserve_module
from shoal.parallel.task_step import get_train_step
from shoal.random_state import preserve_rng

NUM_COUNTS = 16  # further values that travel with gradients


class GroupSum:
    """Sums over a process group, as `ShmAllReduce` computes them within a host."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.size = group, dist.get_world_size(group)

    def sum(self, values: Tensor, factor: float = 1.0) -> Tensor:
        dist.all_reduce(values, group=self._group)
        return values.mul_(factor) if factor != 1.0 else values


class FlatGradients:
    """The gradients of `parameters`, averaged over the ranks in one sum for each dtype."""

    def __init__(self, parameters: list[nn.Parameter], all_reduce: ShmAllReduce | GroupSum) -> None:
        self._all_reduce, self._parameters = all_reduce, parameters
        self._buffers: list[_Buffer] = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            alike = [parameter for parameter in parameters if parameter.dtype == dtype]
            self._buffers.append(_Buffer(alike, len(parameters) + NUM_COUNTS, all_reduce))

    def average(self, may_skip: bool, counts: Tensor | None = None) -> None:
        """Replace each gradient by the mean over all ranks; a rank without one counts as zero. Collective.

        A parameter that no rank has used keeps None. Without `may_skip` every rank must have all of them.

        counts: [n], replaced by their means too. They travel with gradients of their dtype, if there are any
        """
        extra = counts
        if may_skip:
            device, dtype = self._parameters[0].device, torch.float32 if counts is None else counts.dtype
            used = torch.tensor([each.grad is not None for each in self._parameters], dtype=dtype, device=device)
            extra = used if counts is None else torch.cat([used, counts])
        carrier = None
        if extra is not None:
            carrier = next((each for each in self._buffers if each.can_carry(extra)), None)
            if carrier is None:
                self._all_reduce.sum(extra, 1.0 / self._all_reduce.size)
        for buffer in self._buffers:
            buffer.average(extra if buffer is carrier else None)
        if extra is not None and may_skip:
            shares = extra[: len(self._parameters)].tolist()
            for parameter, share in zip(self._parameters, shares, strict=True):
                if not share:
                    parameter.grad = None
            if counts is not None:
                counts.copy_(extra[len(shares) :])


class _Buffer:
    """The gradients of parameters of one dtype, end to end, and after them a few other values.

    In memory that the ranks share, if it is large enough: then gradients are copied there once the backward pass has
    ended, and stay where they are. Otherwise hooks put each into a buffer as it appears, so that only one is in memory
    twice.
    """

    def __init__(self, parameters: list[nn.Parameter], num_others: int, all_reduce: ShmAllReduce | GroupSum) -> None:
        self._parameters, self._all_reduce = parameters, all_reduce
        self._num_values = sum(each.numel() for each in parameters)
        self._flat = parameters[0].detach().new_empty(self._num_values + num_others)
        self._views = self._divide(self._flat[: self._num_values])
        self._rows: ShmAllReduce | None = None
        if isinstance(all_reduce, ShmAllReduce) and all_reduce.has_row_for(self._flat):
            self._rows = all_reduce
        else:
            for parameter, view in zip(parameters, self._views, strict=True):
                parameter.register_post_accumulate_grad_hook(partial(_move_gradient, view))
        self._parts: dict[Tensor, list[Tensor]] = {}  # of rows

    def _divide(self, values: Tensor) -> list[Tensor]:
        """The gradient of each parameter, and the other values if there are any."""
        views, begin = list[Tensor](), 0
        for parameter in self._parameters:
            like = torch.empty_like(parameter)  # dense, in the parameter's memory order, as an optimiser's state
            views.append(values[begin : begin + parameter.numel()].as_strided(like.shape, like.stride()))
            begin += parameter.numel()
        return views + [values[begin:]] * (begin < values.numel())

    def _get_parts(self, values: Tensor) -> list[Tensor]:
        if values not in self._parts:
            self._parts[values] = self._divide(values)
        return self._parts[values]

    def can_carry(self, others: Tensor) -> bool:
        room = self._flat.numel() - self._num_values
        return (others.dtype, others.device) == (self._flat.dtype, self._flat.device) and others.numel() <= room

    @torch.no_grad()
    def average(self, others: Tensor | None) -> None:
        """Replace gradients and `others` by their means over the ranks; a gradient that is None by that of the others.

        Collective.
        """
        flat = self._flat[: self._num_values + (0 if others is None else others.numel())]
        if self._rows is not None:
            values = [_make_dense(*each) for each in zip(self._parameters, self._views, strict=True)]
            if others is not None:
                values.append(others)
            torch._foreach_copy_(self._get_parts(self._rows.next_row(flat)), values)
            self._rows.sum_rows(values, self._get_parts)
            torch._foreach_mul_(values, 1.0 / self._all_reduce.size)
            return
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()
                parameter.grad = view
            else:
                _move_gradient(view, parameter)
        if others is not None:
            flat[self._num_values :].copy_(others)
        self._all_reduce.sum(flat, 1.0 / self._all_reduce.size)
        if others is not None:
            others.copy_(flat[self._num_values :])


def _make_dense(parameter: nn.Parameter, like: Tensor) -> Tensor:
    """The gradient of `parameter`, which has one afterwards, in memory as `like`."""
    grad = parameter.grad
    if grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif grad.is_sparse or grad.stride() != like.stride():
        parameter.grad = torch.empty_like(parameter).copy_(grad.to_dense() if grad.is_sparse else grad)
    assert parameter.grad is not None
    return parameter.grad


def _move_gradient(destination: Tensor, parameter: Tensor) -> None:
    """Move a new gradient into `destination`; later micro-steps of the same step add to it there."""
    if parameter.grad is not destination:
        assert parameter.grad is not None
        destination.copy_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
        parameter.grad = destination


_HAS_FORWARD_SYNC = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
# Buffers stay as they are in each forward: an argument by its name since torch 2.13, or before.
_KEEP_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _HAS_FORWARD_SYNC else "broadcast_buffers": False}


class DdpModel(SpmdModel):
    """DDP. One trial finds whether it must search for unused parameters at each step."""

    def __init__(
        self,
        model: nn.Module,
        learnable: TaskProtocol,
        spec: ParallelSpec,
        world: World,
        example: Any,
        seed: int,
        group: dist.ProcessGroup,
    ) -> None:
        model.to(world.device)
        globalise_batch_norm(model, None)  # a share may be of one sample, which has no statistics of its own
        has_own_step = get_train_step(learnable) is not None  # then the phases of a step have other parameters
        few = split_micro_batches(example, spec.accumulate)[0]
        order = [] if has_own_step else _find_gradient_order(model, learnable, few)
        super().__init__(model, learnable, spec, world, seed, group)
        self._may_skip = spec.dynamic or not all(world.gather(len(set(order)) == len(self._trainable)))
        self._waits = make_waits(world.device)
        self._complete: Any = None
        self._flat_gradients: FlatGradients | None = None
        if self._shm_all_reduce or has_own_step:  # such a step may call parts of the model, past a DDP around it
            self._flat_gradients = FlatGradients(self._trainable, self._shm_all_reduce or GroupSum(group))
            _broadcast_weights(model, group)
            if spec.compile:
                compile_module(model)
            return
        if not _HAS_FORWARD_SYNC:  # such a torch leaves out the first broadcast of buffers too
            _broadcast_weights(model, group)
        self._forward = self._ddp = DistributedDataParallel(
            model,
            process_group=group,
            gradient_as_bucket_view=True,
            find_unused_parameters=self._may_skip,
            **_KEEP_BUFFERS,
        )
        if spec.compile:
            compile_module(self._ddp)
        if order:  # after the last one nothing is left to compute: the rest of backward waits for the other ranks
            order[-1].register_post_accumulate_grad_hook(lambda _: setattr(self, "_complete", self._waits.begin()))

    def _exchange_gradients(self, counts: Tensor | None) -> None:
        if not self._may_skip and any(parameter.grad is None for parameter in self._trainable):
            name = next(name for name, each in self.named_parameters() if each.requires_grad and each.grad is None)
            problem = f"{name} had a gradient at first, and has none in this step"
            raise PlanError("parallel.dynamic", False, problem, "say parallel.dynamic=true when layers may be skipped")
        if self._flat_gradients is None:
            super()._exchange_gradients(counts)
        else:
            began = self._waits.begin()
            self._flat_gradients.average(self._may_skip, counts)
            if not self._shm_all_reduce:  # which keeps its own time
                self._waits.end(began)

    def _backward(self, loss: Tensor) -> None:
        self._complete = None
        super()._backward(loss)
        if self._complete is not None:
            self._waits.end(self._complete)

    def _gradient_sync_context(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last or self._flat_gradients is not None else self._ddp.no_sync()

    def close(self) -> None:
        self._flat_gradients = None  # which refers to the memory that ranks share
        super().close()

    @property
    def communication_s(self) -> float:
        return self._waits.total_s + (self._ranks.waited_s if self._ranks else 0.0)


def _broadcast_weights(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Copy the first rank's parameters and buffers to all. Collective."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            values = tensor.contiguous()  # may be the tensor itself
            dist.broadcast(values.view(-1).view(torch.uint8), group_src=0, group=group)  # Gloo lacks some types
            tensor.copy_(values)


def _find_gradient_order(model: nn.Module, learnable: TaskProtocol, batch: Any) -> list[nn.Parameter]:
    """The parameters that get a gradient from `batch`, in that order. Leaves the model unchanged."""
    order: list[nn.Parameter] = []
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [each.register_post_accumulate_grad_hook(order.append) for each in parameters]
    with preserve_module(model), preserve_rng():
        get_value(learnable.loss(model(*learnable.inputs(batch)), batch)).backward()
    for hook in hooks:
        hook.remove()
    return order
