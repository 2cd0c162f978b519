"""The assignment of tensor parts to ranks and to positions in shards; and what to read to restore them.

The rules are those of torch's distributed checkpoint: its planners find the chunks of a (sharded) tensor, assign a
chunk on several ranks to the one with the least to write, check that the chunks cover the tensor, and intersect them
with a reader's parts. The bytes are ours: a shard is a safetensors file, the index a JSON file.

Called by `checkpointer`. Of files it reads shards, of which it copies the required chunks; it does not communicate.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem
from torch.distributed.tensor import DTensor

from shoal.checkpoint.json_state import Leaf
from shoal.errors import CheckpointError, ConfigError
from shoal.weights.store import encode_header
from shoal.weights.tensor_files import DTYPE_NAMES, DTYPES

Shape = tuple[int, ...]


class StoredChunk(NamedTuple):
    """One chunk of one tensor, and its bytes in the shard's data."""

    name: str
    offsets: Shape
    sizes: Shape
    dtype: torch.dtype
    begin: int
    end: int


@dataclass(frozen=True)
class ShardLayout:
    """One rank's shard. The widest dtypes come first, so that every chunk is aligned without a gap."""

    chunks: tuple[StoredChunk, ...]

    @property
    def size_bytes(self) -> int:
        return self.chunks[-1].end if self.chunks else 0

    def build_header(self) -> bytes:
        """The header of the safetensors file whose data are the chunks in order."""
        return encode_header(
            (
                f"{chunk.name}@{','.join(map(str, chunk.offsets))}",
                DTYPE_NAMES[chunk.dtype],
                chunk.sizes,
                chunk.end - chunk.begin,
            )
            for chunk in self.chunks
        )


def describe_tensors(tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """The key of a valid layout; cheap, since every save computes it."""
    return tuple(
        (name, one.dtype, one.shape, (one.placements, one.device_mesh) if isinstance(one, DTensor) else None)
        for name, one in tensors.items()
    )


def make_save_plan(tensors: Mapping[str, torch.Tensor]) -> SavePlan:
    """The chunks that this rank could write. Raises ConfigError naming a tensor that a checkpoint cannot hold."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided or tensor.is_meta:
            kind = "meta" if tensor.is_meta else f"{tensor.layout}, {tensor.dtype}"
            raise ConfigError(name, kind, "a checkpoint does not hold such a tensor", f"dtypes are {', '.join(DTYPES)}")
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise ConfigError(name, str(tensor.placements), "is a partial sum", "reduce it before saving")
    return create_default_local_save_plan(dict(tensors), is_coordinator=True)


def assign_shards(plans: Sequence[SavePlan]) -> list[ShardLayout]:
    """The shard of each rank, given the chunks that every rank could write.

    Raises CheckpointError when ranks have different tensors under one name, or when parts of a tensor are missing.
    """
    known: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            tensor = _tensor_data(item)
            shape, dtype = tensor.size, tensor.properties.dtype
            other, *same = known.setdefault(item.index.fqn, (rank, shape, dtype))
            if same != [shape, dtype]:
                here, there = f"{dtype} {list(shape)}", f"{same[1]} {list(same[0])}"  # type: ignore[call-overload]
                raise CheckpointError(f"{item.index.fqn} is {there} on rank {other}, but {here} on rank {rank}")
    try:
        shared, _ = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(list(plans))
    except (AssertionError, ValueError) as error:
        raise CheckpointError(f"the ranks' parts do not make whole tensors: {error}") from error
    layouts = []
    for plan in shared:
        chunks, begin = [], 0
        for item in sorted(
            plan.items, key=lambda item: (-_tensor_data(item).properties.dtype.itemsize, item.index.fqn)
        ):
            chunk, dtype = _tensor_data(item).chunk, _tensor_data(item).properties.dtype
            end = begin + math.prod(chunk.sizes) * dtype.itemsize
            chunks.append(StoredChunk(item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes), dtype, begin, end))
            begin = end
        layouts.append(ShardLayout(tuple(chunks)))
    return layouts


def _tensor_data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None  # only tensors are planned
    return item.tensor_data


class ChunkLocation(NamedTuple):
    """The place of a chunk on disk."""

    file: str
    at: int
    dtype: torch.dtype
    sizes: Shape


def build_index(plans: Sequence[SavePlan], layouts: Sequence[ShardLayout], files: Sequence[str]) -> dict[str, Any]:
    """For every tensor its dtype, its shape and its chunks with file and position, as JSON."""
    index: dict[str, Any] = {}
    for item in (item for plan in plans for item in plan.items):
        dtype, shape = DTYPE_NAMES[_tensor_data(item).properties.dtype], list(_tensor_data(item).size)
        index.setdefault(item.index.fqn, {"dtype": dtype, "shape": shape, "chunks": []})
    for layout, file in zip(layouts, files, strict=True):
        head = len(layout.build_header())
        for chunk in layout.chunks:
            at = {"offsets": chunk.offsets, "sizes": chunk.sizes, "file": file, "at": head + chunk.begin}
            index[chunk.name]["chunks"].append(at)
    return index


def plan_reads(index: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[tuple[ReadItem, ChunkLocation]]:
    """The chunks that overlap with this rank's parts. Names, shapes and dtypes must have been compared."""
    metadata: dict[str, Any] = {}
    places: dict[MetadataIndex, ChunkLocation] = {}
    for name in tensors:
        entry = index[name]
        dtype = DTYPES[entry["dtype"]]
        chunks = [ChunkStorageMetadata(torch.Size(one["offsets"]), torch.Size(one["sizes"])) for one in entry["chunks"]]
        metadata[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(entry["shape"]), chunks)
        for one in entry["chunks"]:
            place = ChunkLocation(one["file"], one["at"], dtype, tuple(one["sizes"]))
            places[MetadataIndex(name, one["offsets"])] = place
    plan = create_default_local_load_plan(dict(tensors), Metadata(metadata))
    return [(item, places[item.storage_index]) for item in plan.items]


Misfit = tuple[str, object, str, str]  # the arguments of SpecMismatch


def find_misfit(
    index: Mapping[str, Any], leaves: Mapping[str, Leaf], tensors: Mapping[str, torch.Tensor], here: str
) -> Misfit | None:
    """The first entry of this rank's state that the checkpoint `here` cannot fill."""
    for name in leaves:
        tensor = tensors.get(name)
        other = "tensors" if tensor is None else "values"
        if tensor is None and name in index["values"]:
            continue
        saved = index["tensors"].get(name)
        if name in index[other]:
            kind = "a tensor" if tensor is None else "not a tensor"
            return name, str(type(leaves[name].value).__name__), f"is {kind} in {here}", "load it into the same model"
        if tensor is None or saved is None:
            return name, "", f"is not in {here}", "load it into the same model and optimiser"
        held = (DTYPE_NAMES.get(tensor.dtype), list(tensor.shape), tensor.is_meta)
        if held != (saved["dtype"], saved["shape"], False):
            what = f"{'meta ' * tensor.is_meta}{tensor.dtype} {list(tensor.shape)}"
            return name, what, f"is {saved['dtype']} {saved['shape']} in {here}", "load it into the same model"
    return None


def find_leftovers(
    index: Mapping[str, Any], stored: Sequence[tuple[list[str], list[str], Misfit | None]], here: str
) -> Misfit | None:
    """The first entry of the checkpoint without a place in the state, which has places for others of its kind."""
    tops = tuple({f"{top}." for tops, _, _ in stored for top in tops})
    names = {name for _, names, _ in stored for name in names}
    for name in [*index["tensors"], *index["values"]]:
        if name not in names and name.startswith(tops):
            remedy = "load it into the same model and optimiser, whose state torch makes at its first step"
            return name, "", f"is in {here}, but the state has no place for it", remedy
    return None


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
                with (folder / place.file).open("rb") as file:  # writable for torch, never written back
                    maps[place.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            flat = torch.frombuffer(maps[place.file], dtype=place.dtype, count=math.prod(place.sizes), offset=place.at)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder.name}: {place.file} cannot be read ({error})") from error
        target = tensors[item.dest_index.fqn].detach()
        target = target.to_local() if isinstance(target, DTensor) else target
        source = flat.view(place.sizes)
        _narrow(target, item.dest_offsets, item.lengths).copy_(_narrow(source, item.storage_offsets, item.lengths))


def _narrow(tensor: torch.Tensor, offsets: torch.Size, lengths: torch.Size) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
