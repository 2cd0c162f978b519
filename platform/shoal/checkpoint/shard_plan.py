"""The assignment of tensor parts to ranks and to positions in shards; and what to read to restore them.

The rules are those of torch's distributed checkpoint: its planners find the chunks of a (sharded) tensor, assign a
chunk on several ranks to the one with the least to write, check that the chunks cover the tensor, and intersect them
with a reader's parts. The bytes are ours: a shard is a safetensors file, the index a JSON file.

Called by `checkpointer`; touches no file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

from shoal.errors import CheckpointError, ConfigError
from shoal.weights.tensor_files import DTYPE_NAMES, DTYPES

Shape = tuple[int, ...]


class Slot(NamedTuple):
    """One chunk of one tensor, and its bytes in the shard's data."""

    name: str
    offsets: Shape
    sizes: Shape
    dtype: torch.dtype
    begin: int
    end: int


@dataclass(frozen=True)
class ShardLayout:
    """One rank's shard. The widest dtypes come first, so that every slot is aligned without a gap."""

    slots: tuple[Slot, ...]

    @property
    def size_bytes(self) -> int:
        return self.slots[-1].end if self.slots else 0

    def build_header(self) -> bytes:
        """The header of the safetensors file whose data are the slots in order."""
        entries = {
            f"{slot.name}@{','.join(map(str, slot.offsets))}": {
                "dtype": DTYPE_NAMES[slot.dtype],
                "shape": slot.sizes,
                "data_offsets": [slot.begin, slot.end],
            }
            for slot in self.slots
        }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


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
            whole = _tensor_data(item)
            shape, dtype = whole.size, whole.properties.dtype
            other, *same = known.setdefault(item.index.fqn, (rank, shape, dtype))
            if same != [shape, dtype]:
                here, there = f"{dtype} {list(shape)}", f"{same[1]} {list(same[0])}"  # type: ignore[call-overload]
                raise CheckpointError(f"{item.index.fqn} is {there} on rank {other}, but {here} on rank {rank}")
    try:
        shared, _ = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(list(plans))
    except (AssertionError, ValueError) as error:
        raise CheckpointError(f"the ranks' parts do not make whole tensors: {error}") from error
    return [_build_layout(plan.items) for plan in shared]


def _tensor_data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None  # only tensors are planned
    return item.tensor_data


def _build_layout(items: Sequence[WriteItem]) -> ShardLayout:
    slots, begin = [], 0
    for item in sorted(items, key=lambda item: (-_tensor_data(item).properties.dtype.itemsize, item.index.fqn)):
        chunk, dtype = _tensor_data(item).chunk, _tensor_data(item).properties.dtype
        end = begin + math.prod(chunk.sizes) * dtype.itemsize
        slots.append(Slot(item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes), dtype, begin, end))
        begin = end
    return ShardLayout(tuple(slots))


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
        for slot in layout.slots:
            chunk = {"offsets": slot.offsets, "sizes": slot.sizes, "file": file, "at": head + slot.begin}
            index[slot.name]["chunks"].append(chunk)
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
