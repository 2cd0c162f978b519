"""Sharded data parallel: each rank has a part of every parameter, gradient and optimiser state.

PyTorch's FSDP2 (`fully_shard`) does the work: a block's parameters are gathered just before they are used, and its
gradients are averaged and scattered just after. Over a mesh of [replicate, shard], each copy is sharded (HSDP);
with one rank for each copy this is plain data parallel, for layers that are already split. Called by `parallelize`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from shoal.errors import PlanError
from shoal.parallel.comm.shm_all_reduce import ShmAllReduce
from shoal.parallel.comm.world import World
from shoal.parallel.deferred.weights import DeferredWeights
from shoal.parallel.layers.compile import compile_forward
from shoal.parallel.model import Observer, TaskProtocol
from shoal.parallel.spec import ParallelSpec
from shoal.parallel.spmd.base import TimedCollectivesMixin
from shoal.parallel.spmd.fsdp_layout import PARAMS_DTYPE, autocast_forward, find_blocks, make_fsdp_options
from shoal.parallel.spmd.rank_consistency import BlockUsageCheck
from shoal.parallel.state.module_snapshot import preserve_parameter_attributes


class FsdpModel(TimedCollectivesMixin):
    """FSDP2. Blocks are compiled one by one, as their parameters come and go between them.

    Data ranks must call the same blocks in the same order and, without `dynamic`, use the same parameters: a difference
    is a PlanError at the end of the step. With `dynamic`, a parameter counts as zero on ranks that did not use it (and
    if no rank used it, its gradient is zero, not None).
    """

    def __init__(
        self,
        model: nn.Module,
        learnable: TaskProtocol,
        spec: ParallelSpec,
        world: World,
        seed: int,
        mesh: DeviceMesh,
        group: dist.ProcessGroup,
        deferred: DeferredWeights | None = None,
    ) -> None:
        super().__init__(model, learnable, spec, world, seed, group)
        blocks = list(find_blocks(model))
        for block in [block for _, block in blocks] if spec.compile and blocks else [model] * spec.compile:
            compile_forward(block)
        with preserve_parameter_attributes(model):
            shared = self._shm_all_reduce if mesh["replicate"].size() == 1 else None
            apply_fsdp([*(block for _, block in blocks), model], mesh, spec, shared)
            if deferred is not None:
                deferred.fill(model, world.device if spec.offload == "none" else torch.device("cpu"))
            if spec.offload == "none":  # otherwise FSDP has moved what is not sharded
                model.to(world.device)  # the unsharded part: buffers
        self.collect_parameters()
        assert self._ranks is not None
        self._usage_check = BlockUsageCheck([*blocks, ("", model)], self._ranks, spec.dynamic)
        if spec.precision == "bf16_params":
            self.forward_dtype = PARAMS_DTYPE

    def _compute_gradients(self, batch: Any, step: int, share: float) -> Tensor:
        loss = super()._compute_gradients(batch, step, share)
        named = [(name, each) for name, each in self.named_parameters() if each.requires_grad]
        self._usage_check.check(named, self._world.device)
        return loss

    def evaluate(
        self, batch: Any, num_samples: int, observe: Observer | None = None, is_trial: bool = False
    ) -> dict[str, Tensor]:
        try:
            return super().evaluate(batch, num_samples, observe, is_trial)
        finally:  # a trial goes on after an error of one rank's samples
            self._usage_check.check([], self._world.device)

    def measure_loss(self, batch: Any) -> dict[str, Tensor]:
        try:
            return super().measure_loss(batch)
        finally:
            self._usage_check.check([], self._world.device)

    @contextmanager
    def _gradient_sync_context(self, last: bool) -> Iterator[None]:
        assert isinstance(self.module, FSDPModule)
        if not last:
            self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            if not last:
                self.module.set_requires_gradient_sync(True)


def apply_fsdp(
    parts: Sequence[nn.Module], mesh: DeviceMesh, spec: ParallelSpec, shared: ShmAllReduce | None = None
) -> None:
    """Shard each of `parts`, in place, over [replicate, shard] of the mesh; inner ones come first. Collective.

    spec:   its options for FSDP; with `dynamic` a parameter counts as zero on ranks that have not used it
    shared: the memory of the ranks of `shard`, if they are on one host
    """
    comms = None
    if shared is not None:
        _reserve_memory(parts, shared)
        comms = _AllGather(shared), _ReduceScatter(shared)
    names = ("replicate", "shard") if mesh["replicate"].size() > 1 else ("shard",)
    for part in parts:
        part.register_forward_hook(lambda module, args, output: tree_map_only(Tensor, _prepare_output, output))
        if spec.precision == "bf16_params":
            autocast_forward(part, mesh.device_type)
        sharded = fully_shard(part, mesh=mesh[names], **make_fsdp_options(spec, part is parts[-1]))
        if comms is not None:
            sharded.set_custom_all_gather(comms[0])
            sharded.set_custom_reduce_scatter(comms[1])
            sharded.set_modules_to_backward_prefetch([sharded])  # no other one: a gather ends where it begins
        if hasattr(sharded, "set_reduce_scatter_unused_params"):
            sharded.set_reduce_scatter_unused_params(spec.dynamic)
        elif spec.dynamic:
            problem = f"needs an exchange of unused parameters, which torch {torch.__version__} lacks in FSDP2"
            raise PlanError("parallel.dynamic", spec.dynamic, problem, "use torch 2.13 or newer, or parallel=ddp")


class _Done(dist.Work):
    """What a collective returns that has ended: FSDP2 then lets go of the gathered values as soon as it has copied
    them."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class _AllGather(AllGather):
    """Gathers the blocks of a model in memory that all ranks map, each block in the place of the one before."""

    def __init__(self, shared: ShmAllReduce) -> None:
        self._shared = shared
        self._lent: Callable[[], Tensor | None] = lambda: None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert self._lent() is None, "the block that was gathered before has not been copied"
        with _disable_current_modes():  # it may run where checkpointed layers note their operators
            lent = self._shared.lend(self._shared.gathered, size[0], dtype)
        self._lent = weakref.ref(lent)
        return lent

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> dist.Work:
        self._shared.gather_lent(input_tensor)
        return _Done()


class _ReduceScatter(ReduceScatter):
    """Averages, or adds up, their gradients, in the same memory."""

    def __init__(self, shared: ShmAllReduce) -> None:
        self._shared, self._is_input = shared, False

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Called for an input and then for the output, which becomes the gradients."""
        self._is_input = not self._is_input
        if not self._is_input:
            return torch.empty(*size, dtype=dtype)
        return self._shared.lend(self._shared.pieces[self._shared.rank], size[0], dtype)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, *_: Any, **__: Any) -> None:
        factor = 1.0 / self._shared.size if op == dist.ReduceOp.AVG else 1.0
        with _disable_current_modes():
            self._shared.sum_scattered(output_tensor, input_tensor, factor)


def _reserve_memory(parts: Sequence[nn.Module], shared: ShmAllReduce) -> None:
    """Reserve as much as the largest of `parts` needs, without those before it, once padded to equal shards."""
    counted, most = set[nn.Parameter](), 0
    for part in parts:
        own = set(part.parameters()) - counted
        size_bytes = 0
        for parameter in own:  # by their shapes: an index of a split one may be collective
            first, *others = *parameter.shape, 1
            padded = -(-first // shared.size) * shared.size * math.prod(others)
            size_bytes += padded * max(parameter.element_size(), torch.float32.itemsize)
        counted, most = counted | own, max(most, size_bytes)
    shared.reserve(most)


def _prepare_output(output: Tensor) -> Tensor:
    """FSDP2 hooks the outputs of its modules; it would miss in-place changes of a view of one."""
    output = output.clone() if output._is_view() else output
    if output.requires_grad:
        output.register_hook(_refuse_second_derivative)
    return output


def _refuse_second_derivative(gradient: Tensor) -> None:
    if torch.is_grad_enabled():
        problem = "a second derivative (create_graph=True) needs weights that are freed after the first"
        raise PlanError("parallel", "fsdp", problem, "use parallel=ddp, which keeps them")
