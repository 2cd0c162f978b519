"""IDX files, plain or gzipped: MNIST and its kin (http://yann.lecun.com/exdb/mnist, "the IDX file format")."""

from __future__ import annotations

import gzip
import struct
import zlib
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from shoal.errors import DataError
from shoal.extend.data import FileDataset, Indices
from shoal.libs.files.fields import as_tensor, check_equal_lengths, require_path
from shoal.store import fetch

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


class _Header(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int


class Idx(FileDataset):
    """Samples from IDX files of equal length, one part of the tuple for each: `Idx(images, labels)`.

    Bytes with two or more dimensions a sample are pictures: float32 [B, 1, H, W] from 0 to 1 (`scale=False`: as they
    are). Whole numbers, one a sample, are labels: int64 [B]. Everything else keeps its dtype and shape.
    Plain files are memory-mapped; gzipped ones are unpacked into memory where they are read.
    """

    def __init__(self, *paths: str | Path, scale: bool = True) -> None:
        files = [require_path(path) for path in paths]
        if not files:
            raise DataError("paths", paths, "names no file")
        self.scale = scale
        self._headers = [_read_header(path) for path in files]
        lengths = {path.name: header.shape[0] for path, header in zip(files, self._headers, strict=True)}
        super().__init__(files, check_equal_lengths(lengths, files[0].parent))

    @classmethod
    def mnist(cls, folder: str | Path, train: bool) -> Self:
        """The training or test half of a folder with MNIST's file names, `.gz` or not. Raises DataError."""
        parent, stem = require_path(folder, "folder"), "train" if train else "t10k"
        files = []
        for name in (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"):
            found = (each for each in parent.iterdir() if each.name in (name, f"{name}.gz"))
            candidates = sorted(found, key=attrgetter("name"))  # a bucket's files have other paths
            if not candidates:
                raise DataError("folder", str(folder), f"has no {name}, nor {name}.gz")
            files.append(candidates[0])
        fetch(files)
        return cls(*files)

    def shapes(self) -> dict[str, str]:
        return {str(index): f"{head.dtype.name}{head.shape[1:]}" for index, head in enumerate(self._headers)}

    def batch(self, indices: Indices) -> tuple[Tensor, ...]:
        tensors = []
        for array in self._files:
            tensor = as_tensor(array[indices], "idx")
            if array.ndim == 1 and not tensor.is_floating_point():
                tensor = tensor.to(torch.int64)
            elif self.scale and array.ndim >= 3 and tensor.dtype == torch.uint8:
                tensor = tensor.unsqueeze(1).to(torch.float32).div_(255)
            tensors.append(tensor)
        return tuple(tensors)

    def _open(self) -> list[np.ndarray[Any, Any]]:
        arrays: list[np.ndarray[Any, Any]] = []
        for path, header in zip(self.paths, self._headers, strict=True):
            if path.suffix != ".gz":
                arrays.append(np.memmap(path, header.dtype, "r", header.offset, header.shape))
                continue
            try:
                payload = gzip.decompress(path.read_bytes())
            except (OSError, EOFError, zlib.error) as error:
                raise DataError("path", str(path), f"is damaged ({error})", "fetch the file again") from error
            arrays.append(np.frombuffer(payload, header.dtype, offset=header.offset).reshape(header.shape))
        return arrays


def _read_header(path: Path) -> _Header:
    """The header, once the file is as long as it says. Raises DataError."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            magic = file.read(4)
            if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _DTYPES or not magic[3]:
                raise DataError("path", str(path), f"is not an IDX file (it begins with {magic.hex() or 'nothing'})")
            words = file.read(4 * magic[3])
    except (OSError, EOFError, zlib.error) as error:
        raise DataError("path", str(path), f"cannot be read ({error})", "fetch the file again") from error
    if len(words) < 4 * magic[3]:
        raise DataError("path", str(path), "is truncated within its header", "fetch the file again")
    header = _Header(np.dtype(_DTYPES[magic[2]]), struct.unpack(f">{magic[3]}I", words), 4 + len(words))
    expected = header.offset + header.dtype.itemsize * int(np.prod(header.shape, dtype=np.int64))
    actual = path.stat().st_size
    if path.suffix == ".gz":
        with path.open("rb") as file:  # its last word: the size modulo 2**32
            file.seek(-4, 2)
            actual = int.from_bytes(file.read(4), "little")
    if actual != expected % 2**32 if path.suffix == ".gz" else actual != expected:
        shape = " x ".join(map(str, header.shape))
        problem = f"is truncated or damaged: {shape} {header.dtype.name} take {expected} bytes, it says {actual}"
        raise DataError("path", str(path), problem, "fetch the file again")
    return header
