"""Reads chunks of tensors from shard files, copying only the required ones. Called by `checkpointer`."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from shoal.checkpoint.shard_plan import ChunkLocation
from shoal.errors import CheckpointError


def shard_name(rank: int, size: int) -> str:
    """The file of this rank."""
    return f"shard-{rank:05d}-of-{size:05d}.safetensors"


@torch.no_grad()
def fill_tensors(
    folder: Path, wanted: Iterable[tuple[ReadItem, ChunkLocation]], tensors: dict[str, torch.Tensor]
) -> None:
    """Copy every required piece into its tensor. Raises CheckpointError."""
    maps: dict[str, mmap.mmap] = {}
    for item, place in wanted:
        if not math.prod(item.lengths):
            continue
        try:
            if place.file not in maps:
                maps[place.file] = _map_file(folder / place.file)
            flat = torch.frombuffer(maps[place.file], dtype=place.dtype, count=math.prod(place.sizes), offset=place.at)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder.name}: {place.file} cannot be read ({error})") from error
        target = tensors[item.dest_index.fqn].detach()
        target = target.to_local() if isinstance(target, DTensor) else target
        source = flat.view(place.sizes)
        _narrow(target, item.dest_offsets, item.lengths).copy_(_narrow(source, item.storage_offsets, item.lengths))


def _map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writable for torch, never written back


def _narrow(tensor: torch.Tensor, offsets: torch.Size, lengths: torch.Size) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
