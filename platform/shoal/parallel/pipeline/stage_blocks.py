"""The blocks of a stage: sharded over data ranks, or compiled. Called by the pipeline when it is built."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shoal.parallel.pipeline.partition import StagePartition
from shoal.parallel.pipeline.stage_forward import StageSlice
from shoal.parallel.spec import ParallelSpec
from shoal.parallel.spmd.fsdp import apply_fsdp
from shoal.parallel.spmd.fsdp_blocks import find_blocks
from shoal.parallel.state.module_snapshot import preserve_parameter_attributes


def shard_blocks(
    model: nn.Module, layout: StagePartition, own: list[int], mesh: DeviceMesh, spec: ParallelSpec
) -> list[tuple[str, nn.Module]]:
    """Shard the blocks that only these stages use, and return them with their names. The rest stays unsharded."""
    blocks = []
    for path, block in find_blocks(model):
        if all(set(layout.parameters[f"{path}.{name}"]) <= set(own) for name, _ in block.named_parameters()):
            blocks.append((path, block))
    with preserve_parameter_attributes(model):
        apply_fsdp([block for _, block in blocks], mesh, spec)
    return blocks


def find_gated_modules(model: nn.Module, compiled: list[str]) -> set[str]:
    """Modules with parameters of their own, except those in compiled blocks, which would skip gates."""
    named = dict(model.named_modules())
    within = {inner for block in compiled for inner in named[block].modules() if inner is not named[block]}
    own = {name for name, module in named.items() if any(True for _ in module.parameters(recurse=False))}
    return {name for name in own if named[name] not in within}


def compile_blocks(model: nn.Module, blocks: list[str], views: list[StageSlice]) -> list[str]:
    """The blocks that run completely or not at all: a compiled one would skip the gates within it."""
    gated = {name for view in views for name in view.actions}
    compiled = [name for name in blocks if not any(each.startswith(f"{name}.") for each in gated)]
    for name in compiled:
        module = model.get_submodule(name)
        module.forward = torch.compile(module.forward)
    return compiled
