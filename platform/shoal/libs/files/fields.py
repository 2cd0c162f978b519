"""What the formats share: fields of a sample by name, and paths, which may be URLs. Called by the formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.errors import DataError
from shoal.extend.data import FileDataset, Indices
from shoal.store import BucketPath, fetch, locate

Position = TypeVar("Position")
Fields = Mapping[str, str] | Sequence[str]


class FieldDataset(FileDataset):
    """Fields of a sample by name, of each an array or what is read like one. `_open` gives them.

    as_dict: whether a batch is a dict, or a tuple
    """

    as_dict: bool
    _shapes: dict[str, str]

    def shapes(self) -> dict[str, str]:
        return self._shapes

    def batch(self, indices: Indices) -> Any:
        tensors = {name: as_tensor(self._read(field, indices), name) for name, field in self._files.items()}
        return build_batch(tensors, self.as_dict)

    def _read(self, field: Any, indices: Indices) -> np.ndarray[Any, Any]:
        rows: np.ndarray[Any, Any] = field[indices]
        return rows


def require_path(path: str | Path, field: str = "path") -> Path:
    """The absolute path of an existing file or folder, which may be given by a URL. Raises DataError.

    A file of a bucket is on this host then; those of a folder are after `fetch`.
    """
    located = locate(path, field)
    if isinstance(located, BucketPath):
        if not located.is_dir():
            fetch([located])
        return located
    if not located.exists():
        near = located.parent if located.parent.exists() else Path.cwd()
        raise DataError(field, str(path), "does not exist", f"looked from {Path.cwd()}; {near} is there")
    return located


def parse_fields(fields: Fields) -> tuple[dict[str, str], bool]:
    """{name in the batch: place in the file}, and whether a batch is a dict (for a mapping) or a tuple."""
    if isinstance(fields, str) or not fields:
        raise DataError(
            "fields", fields, "names nothing to read", "give a list of names, or {name in the batch: place}"
        )
    if isinstance(fields, Mapping):
        return dict(fields), True
    return name_positions(fields), False


def name_positions(positions: Sequence[Position]) -> dict[str, Position]:
    """Each position of a list under its own name; a repeated one gets primes, so that a tuple has it as often."""
    names: dict[str, Position] = {}
    for position in positions:
        name = str(position)
        while name in names:
            name += "'"
        names[name] = position
    return names


def check_equal_lengths(lengths: Mapping[str, int], path: Path) -> int:
    """The one length of all fields. Raises DataError when they differ."""
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError("data", str(path), f"is ragged: its fields have unequal lengths ({listed})")
    return next(iter(lengths.values()))


def as_tensor(values: np.ndarray[Any, Any], name: str) -> Tensor:
    """A tensor over the array's memory if torch has the dtype (in native byte order). Raises DataError."""
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    try:
        return torch.from_numpy(values)
    except TypeError as error:
        remedy = "leave it out, or turn it into numbers in a dataset of your own"
        raise DataError("fields", name, f"has dtype {values.dtype}, which no tensor can hold", remedy) from error


def build_batch(tensors: dict[str, Tensor], as_dict: bool) -> Any:
    """The batch: a dict, or a tuple in the same order."""
    return tensors if as_dict else tuple(tensors.values())
