"""Tensor parallel: the ranks of a group have parts of single layers, and work on the same samples.

PyTorch's DTensor styles do the work, by the plan of `plan`. With several data ranks, FSDP2 shards (or replicates) the
split layers. Called by `parallelize`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from shoal.parallel.comm.world import World, make_data_group, make_mesh
from shoal.parallel.deferred.weights import DeferredWeights, decide_plan, move_to_device
from shoal.parallel.layers.compile import compile_module
from shoal.parallel.layers.dropout import SeededDropout, TensorPart
from shoal.parallel.model import ParallelModel, TaskProtocol
from shoal.parallel.spec import ParallelDims, ParallelSpec
from shoal.parallel.spmd.base import SpmdModel, TimedCollectivesMixin
from shoal.parallel.spmd.fsdp import FsdpModel
from shoal.parallel.state.module_snapshot import preserve_parameter_attributes
from shoal.parallel.tensor.plan import TensorPlan, find_tensor_plan

CPU = torch.device("cpu")


class TensorParallelModel(TimedCollectivesMixin):
    """One copy of a model, its layers split over all ranks."""

    def __init__(self, model: nn.Module, learnable: TaskProtocol, spec: ParallelSpec, world: World, seed: int) -> None:
        super().__init__(model, learnable, spec, world, seed)
        if spec.compile:
            compile_module(model)


def build_tensor_parallel(
    model: nn.Module,
    learnable: TaskProtocol,
    spec: ParallelSpec,
    degrees: ParallelDims,
    world: World,
    example: Any,
    seed: int,
    deferred: DeferredWeights | None = None,
) -> ParallelModel:
    """Split the layers by rank 0's plan, then distribute the copies over the data ranks. Collective."""
    plan = agree_on_tensor_plan(model, learnable, degrees.tensor, world, example, deferred)
    mesh = make_mesh(degrees, world)
    move_to_device(model, world.device)
    split_layers(model, plan, mesh["tensor"])
    parallel: SpmdModel
    if degrees.data == 1:
        if deferred is not None:
            deferred.fill(model, world.device)
        parallel = TensorParallelModel(model, learnable, spec, world, seed)
    else:
        parallel = FsdpModel(model, learnable, spec, world, seed, mesh, make_data_group(degrees, world), deferred)
    split_dropouts(model, plan, mesh["tensor"])
    parallel.sum_gradients_of(plan.summed, mesh.get_group("tensor"))
    return parallel


def split_dropouts(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Let dropout layers with a part of the features draw that part of their masks. They must be seeded."""
    for name, dim in plan.dropouts.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, SeededDropout)
        layer.part = TensorPart(dim, mesh.get_local_rank(), mesh.size())


def agree_on_tensor_plan(
    model: nn.Module,
    learnable: TaskProtocol,
    size: int,
    world: World,
    example: Any,
    deferred: DeferredWeights | None = None,
    device: torch.device = CPU,
) -> TensorPlan:
    """Ranks are fed different samples, of which a model may make different calls: one of them decides.

    deferred: of a model without memory for its parameters, whose buffers are on `device`
    """
    return decide_plan(lambda: find_tensor_plan(model, learnable, size, example), model, deferred, world, device)


def split_layers(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Split the layers of `model` by `plan`, in place. Every rank must have the same weights."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    kinds: dict[str, ParallelStyle] = {
        "column": ColwiseParallel(),
        "row": RowwiseParallel(),
        "column_gathered": ColwiseParallel(output_layouts=Replicate()),
        "row_split": RowwiseParallel(input_layouts=Replicate()),
        "vocabulary": RowwiseParallel(input_layouts=Replicate()),
    }
    styles = {name: kinds[style] for name, style in plan.styles.items()}
    with preserve_parameter_attributes(model):
        parallelize_module(model, mesh, styles, src_data_rank=None)
    for first, *others in names.values():  # tied weights were split separately: tie them again
        for other in others:
            owner, _, attribute = other.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
    for name in plan.modified_in_place:  # DTensor returns a view, which autograd does not allow to change
        model.get_submodule(name).register_forward_hook(lambda module, args, output: output.clone())
    for (owner, attribute), value in plan.changes.items():
        setattr(model.get_submodule(owner), attribute, value)
