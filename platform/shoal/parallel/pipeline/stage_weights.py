"""The part of a model's weights on a rank of a pipeline, under their names in the full model; and the blocks of its
stages, which are sharded over data ranks, or compiled.

Called by `pipeline` when it is built. Frees the other stages' weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shoal.errors import PlanError
from shoal.parallel.pipeline.partition import StagePartition
from shoal.parallel.pipeline.stage_forward import StageSlice, release_parameters
from shoal.parallel.spec import ParallelSpec
from shoal.parallel.spmd.fsdp import apply_fsdp
from shoal.parallel.spmd.fsdp_layout import find_blocks
from shoal.parallel.state.module_snapshot import preserve_parameter_attributes
from shoal.parallel.state.state_dict import copy_tensors, gather_full_tensor


class StageWeights:
    """This rank's part of the model.

    kept:    parameters by their first names, including copies of other ranks' parameters
    counted: those that this rank counts, so that a norm has each once
    tied:    names of parameters on several pipeline ranks, by these ranks, in the same order everywhere
    """

    def __init__(
        self, model: nn.Module, layout: StagePartition, stage_ranks: list[int], rank: int, device: torch.device
    ) -> None:
        self._model = model
        self._layout = layout
        self._stage_ranks = stage_ranks
        self._rank = rank
        holders = {name: sorted({stage_ranks[stage] for stage in stages}) for name, stages in layout.parameters.items()}
        first_names = {parameter: name for name, parameter in model.named_parameters()}
        self._first_names = {
            name: first_names[parameter] for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        release_parameters(model, {name for name, ranks in holders.items() if rank in ranks}, device)
        everything = dict(model.named_parameters())
        self.local_parameters = {name: everything[name] for name, ranks in holders.items() if rank in ranks}
        self._owners = {name: stage_ranks[stages[0]] for name, stages in layout.parameters.items()}
        self.owned_parameters = [
            parameter for name, parameter in self.local_parameters.items() if self._owners[name] == rank
        ]
        self.tied_names: dict[tuple[int, ...], list[str]] = {}
        for name, ranks in holders.items():
            if len(ranks) > 1:
                self.tied_names.setdefault(tuple(ranks), []).append(name)

    def get_stage_parameters(self, stage: int) -> list[nn.Parameter]:
        """The stage's parameters."""
        return [each for name, each in self.local_parameters.items() if stage in self._layout.parameters[name]]

    def state(self) -> dict[str, Any]:
        """Parameters on this rank under all their names, and the persistent buffers stored here."""
        local = {}
        for name, value in self._model.state_dict().items():
            first = self._first_names.get(name)
            if self._get_owner(name) == self._rank if first is None else first in self.local_parameters:
                local[name] = value
        return local

    def load(self, values: Mapping[str, Any]) -> None:
        """Raises SpecMismatch, naming the first tensor that is missing, unknown or of another shape."""
        copy_tensors(values, self.state(), "this stage")

    def iter_full(self, rank: int, global_ranks: list[int] | None) -> Iterator[tuple[str, Tensor]]:
        """The full model's state on the CPU of global rank 0, tensor by tensor; nothing elsewhere. Collective.

        global_ranks: those of this pipeline, if it is the one with global rank 0, its first; else None
        """
        for name, value in self._model.state_dict().items():
            if not isinstance(value, Tensor):
                continue
            owner = self._get_owner(name)
            if rank == owner:
                own = gather_full_tensor(value) if isinstance(value, DTensor) else value
                if global_ranks is not None and rank == 0:
                    yield name, own.detach().cpu()
                elif global_ranks is not None and value.numel():
                    dist.send(_as_bytes(own.detach().cpu().contiguous()), global_ranks[0])
                del own  # before the next one is gathered
            elif rank == 0 and global_ranks is not None:
                received = torch.empty(value.shape, dtype=value.dtype)
                if value.numel():
                    dist.recv(_as_bytes(received), global_ranks[owner])
                yield name, received
                del received

    def _get_owner(self, name: str) -> int:
        first = self._first_names.get(name)
        if first is not None:
            return self._owners[first]
        return self._stage_ranks[self._layout.buffers.get(name, 0)]


def check_copied_weights(model: nn.Module, layout: StagePartition, stage_ranks: list[int]) -> None:
    """Raises PlanError for a layer that changes its weight when called, if another rank has a copy."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is None:
            continue
        ranks = {stage_ranks[stage] for stage in layout.parameters[names[id(module.weight)]]}
        if len(ranks) > 1:
            problem = f"has a max_norm, and pipeline ranks {sorted(ranks)} use its weight: one alone would shorten it"
            raise PlanError("model", name, problem, "normalise what it gives in the forward pass")


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


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
