"""Data parallel: each rank has the full model and a share of the batch, and gradients are averaged.

By PyTorch's DistributedDataParallel as they appear; between CPU ranks of one host all at once, see `gradient_buffer`.
Buffers are not broadcast: running statistics of batch normalisation are equal on every rank, and other buffers that
training changes must be, see `batch_norm` and `rank_consistency`. Called by `parallelize`.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal.errors import PlanError
from shoal.parallel.comm.collective_timer import make_waits
from shoal.parallel.comm.world import World
from shoal.parallel.layers.batch_norm import globalise_batch_norm
from shoal.parallel.layers.compile import compile_module
from shoal.parallel.loss import get_value
from shoal.parallel.micro_batches import split_micro_batches
from shoal.parallel.model import TaskProtocol
from shoal.parallel.spec import ParallelSpec
from shoal.parallel.spmd.base import SpmdModel
from shoal.parallel.spmd.gradient_buffer import FlatGradients, GroupSum
from shoal.parallel.state.module_snapshot import preserve_module
from shoal.parallel.task_step import get_train_step
from shoal.random_state import preserve_rng

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
