"""Which rank stores which layers: the table that `shoal inspect` shows before anything runs.

Uses the model alone: no process group, and nothing runs (the tensor plan is computed where a batch exists).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from shoal.extend.cost import PlacementRow
from shoal.extend.parallel import ParallelDims, TensorPlan, fsdp_layout


@dataclass
class _LayerGroup:
    """Consecutive layers with the same placement."""

    layout: str
    share: float
    ranks: tuple[int, ...]
    names: list[str] = field(default_factory=list)
    num_parameters: int = 0


def build_placement(
    model: nn.Module,
    degrees: ParallelDims,
    tensor: TensorPlan | None = None,
    pipeline_ranks: Mapping[str, Sequence[int]] | None = None,
) -> list[PlacementRow]:
    """A row for each run of layers with the same placement, in the model's order; tied parameters count once.

    pipeline_ranks: of each parameter, by its first name: the ranks along the pipeline that have it
    """
    groups: list[_LayerGroup] = []
    unsharded = set[str]() if pipeline_ranks is None else _find_unsharded_modules(model, pipeline_ranks)
    for name, first, num_parameters in _iter_layers(model):
        layout, share = _describe_split(name, degrees, tensor, name not in unsharded)
        ranks = tuple(
            rank
            for rank in range(degrees.workers)
            if pipeline_ranks is None or degrees.coordinates(rank).pipeline in pipeline_ranks[first]
        )
        if not groups or (groups[-1].layout, groups[-1].ranks) != (layout, ranks):
            groups.append(_LayerGroup(layout, share, ranks))
        groups[-1].names.append(name or type(model).__name__)
        groups[-1].num_parameters += num_parameters
    rows = []
    for each in groups:
        module = each.names[0] if len(each.names) == 1 else f"{each.names[0]} ... {each.names[-1]}"
        rows.append(PlacementRow(module, each.num_parameters, each.layout, each.ranks, each.share))
    return rows


def _iter_layers(model: nn.Module) -> Iterator[tuple[str, str, int]]:
    """The modules with parameters of their own: name, first parameter's name, and how many; a tied one counts once."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [(key, each) for key, each in module.named_parameters(name, recurse=False) if id(each) not in seen]
        seen |= {id(each) for _, each in own}
        if own:
            yield name, own[0][0], sum(each.numel() for _, each in own)


def _find_unsharded_modules(model: nn.Module, pipeline_ranks: Mapping[str, Sequence[int]]) -> set[str]:
    """The modules that a pipeline never shards: those outside of blocks that one rank alone has."""
    sharded = set()
    for path, block in fsdp_layout.find_blocks(model):
        holders = [pipeline_ranks.get(f"{path}.{name}", ()) for name, _ in block.named_parameters()]
        if all(len(ranks) == 1 for ranks in holders) and len({ranks[0] for ranks in holders}) == 1:
            sharded |= {f"{path}.{name}".removesuffix(".") for name, _ in block.named_modules()}
    return {name for name, _ in model.named_modules()} - sharded


def _describe_split(
    name: str, degrees: ParallelDims, tensor: TensorPlan | None, can_be_sharded: bool
) -> tuple[str, float]:
    parts: list[str] = []
    share = 1.0
    style = tensor.styles.get(name) if tensor is not None and degrees.tensor > 1 else None
    if style is not None:
        parts.append(f"1/{degrees.tensor} by {style.replace('_', ', ')}")
        share /= degrees.tensor
    if degrees.shard and can_be_sharded and degrees.data > degrees.replicate:
        shards = degrees.data // degrees.replicate
        parts.append(f"1/{shards} sharded")
        share /= shards
    return " x ".join(parts) or "whole", share
