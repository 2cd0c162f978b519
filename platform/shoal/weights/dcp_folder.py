"""A folder of torch's distributed checkpoint (DCP) as the tensors of a model, read and written one by one.

The layout is that of torchtitan: the model's tensors have their own names at the top, or lie below `model`, as earlier
releases wrote them; beside them lie `optimizer`, `lr_scheduler`, `train_state` and `dataloader`, which are not read.
Format: torch/distributed/checkpoint. Of `.metadata`, a pickle, only the classes of such a checkpoint are loaded.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from shoal.errors import WeightsError
from shoal.weights.tensor_files import LazyTensors, TensorTypes

METADATA = ".metadata"
_OTHERS = frozenset({"optimizer", "lr_scheduler", "train_state", "dataloader"})
_HOME = "torch.distributed.checkpoint"
_METADATA_CLASSES = (
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_CLASSES = {
    *((f"{_HOME}.metadata", name) for name in _METADATA_CLASSES),
    (f"{_HOME}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
}


class DcpTensors(LazyTensors):
    """The model's tensors by name, each read when it is asked for. Raises WeightsError for what cannot be read."""

    def __init__(self, folder: Path) -> None:
        try:
            with (folder / METADATA).open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except (OSError, pickle.UnpicklingError, EOFError, ValueError, AttributeError, TypeError, IndexError) as error:
            raise WeightsError(f"{folder / METADATA} cannot be read as a distributed checkpoint's ({error})") from error
        if not isinstance(metadata, Metadata) or not metadata.storage_data:
            raise WeightsError(f"{folder / METADATA} describes no distributed checkpoint of files")
        self._folder, self._metadata = folder, metadata
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(self._metadata, True)
        self.files: dict[str, str] = {}  # the key of each
        for key, described in self._metadata.state_dict_metadata.items():
            if isinstance(described, TensorStorageMetadata) and (name := self._find_name(key)) is not None:
                self.files[name] = key

    def _find_name(self, key: str) -> str | None:
        """The name within the model; None for what is not of the model."""
        paths = self._metadata.planner_data
        path = paths.get(key, (key,)) if isinstance(paths, Mapping) else (key,)
        if path[0] == "model" and len(path) > 1:
            return ".".join(map(str, path[1:]))
        return key if len(path) == 1 and key.partition(".")[0] not in _OTHERS else None

    def get_shape(self, name: str) -> torch.Size:
        """The shape of a tensor, which is not read."""
        described = self._metadata.state_dict_metadata[self.files[name]]
        assert isinstance(described, TensorStorageMetadata)
        return torch.Size(described.size)

    def __getitem__(self, name: str) -> Tensor:
        key = self.files[name]
        described = self._metadata.state_dict_metadata[key]
        assert isinstance(described, TensorStorageMetadata)
        tensor = torch.empty(described.size, dtype=described.properties.dtype)
        planner = DefaultLoadPlanner()
        try:
            planner.set_up_planner({key: tensor}, self._metadata, is_coordinator=True)
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except (OSError, pickle.UnpicklingError, RuntimeError, EOFError, KeyError, AssertionError, ValueError) as error:
            raise WeightsError(f"{name!r} of the checkpoint {self._folder} cannot be read ({error!r})") from error
        return tensor


def open_dcp(folder: Path) -> DcpTensors:
    """The model's tensors of a checkpoint, none of which is read yet. Raises WeightsError."""
    return DcpTensors(folder)


def write_dcp(folder: Path, types: TensorTypes, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint of `tensors`, which are asked for one by one, each into a file of its own; `.metadata` last.

    types: of all of them

    Raises OSError, and what `tensors` raises.
    """
    writer, planner = FileSystemWriter(folder, single_file_per_rank=False), _LazyPlanner(tensors)
    writer.set_up_storage_writer(True)
    planner.set_up_planner(
        {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in types.items()},
        writer.storage_meta(),
        is_coordinator=True,
    )
    (plan,), metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan([plan])
    written = writer.write_data(planner.finish_plan(plan), planner)
    written.wait()
    writer.finish(metadata, [written.value()])


class _LazyPlanner(DefaultSavePlanner):
    """Plans with tensors without memory, and looks the real ones up when they are written."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._tensors[index.fqn]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name} is not of a checkpoint's description, and is not loaded")
        return super().find_class(module, name)
