"""Weights in safetensors files: written and read tensor by tensor, in one file or in several with an index.

Written at the end of a training run; read whole where a network is filled, and in part by ranks and workers. Apart from
`read_tensors`, no function holds more than one tensor. Several files have the layout of Hugging Face:
`model-00001-of-00003.safetensors` and, written last, `model.safetensors.index.json`
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.atomic_file import create_private, hash_file, make_folder, replace_synced, sync_folder
from shoal.errors import WeightsError
from shoal.weights.store import (
    REMEDY,
    WeightFile,
    WeightPart,
    WeightSnapshot,
    decode_header,
    encode_header,
)

MAX_FILE_BYTES = 2 << 30  # of tensors in one file, unless a single one has more
INDEX_SUFFIX = ".index.json"
PIECE_BYTES = 16 << 20  # that one thread reads of a tensor
# In the order in which the library of safetensors writes them.
DTYPES: dict[str, torch.dtype] = {
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64, "F32": torch.float32,
    "U32": torch.uint32, "I32": torch.int32, "BF16": torch.bfloat16, "F16": torch.float16, "U16": torch.uint16,
    "I16": torch.int16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PLACES = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}

TensorTypes = Mapping[str, tuple[torch.dtype, torch.Size]]  # of tensors that need not exist yet, by name


def write_tensors(path: Path, types: TensorTypes, tensors: Iterable[tuple[str, Tensor]]) -> Path:
    """Write the tensors of `types` as they come; returns `path`, or the index beside it when there are several files.

    Complete or not at all: the index comes last, and names no file of an earlier call that was interrupted. Exhausts
    `tensors` after an error of its own too: other ranks may take part in making them.

    Raises OSError, and WeightsError for a dtype that safetensors lacks.
    """
    coming = iter(tensors)
    files = _divide(path, types)
    drafts = {file: file.with_name(f".{file.name}.draft") for file in files}
    try:
        make_folder(path.parent)
        locations = _write_headers({drafts[file]: names for file, names in files.items()}, types)
        for name, tensor in coming:
            draft, begin = locations.pop(name)
            with draft.open("r+b") as opened:
                opened.seek(begin)
                opened.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one comes
        assert not locations, f"{next(iter(locations))} never came"
        for file, draft in drafts.items():
            with draft.open("rb") as opened:
                os.fsync(opened.fileno())
            draft.replace(file)
        sync_folder(path.parent)
        return path if len(files) == 1 else _write_index(path, files, types)
    except (OSError, WeightsError):
        for _ in coming:
            pass
        raise
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)


def list_files(path: Path) -> list[Path]:
    """The files of an index, in order; of another path the path itself. Raises WeightsError for a damaged index."""
    if not path.name.endswith(INDEX_SUFFIX):
        return [path]
    return [path.with_name(name) for name in sorted(set(_read_index(path).values()))]


def list_with_index(path: Path) -> list[Path]:
    """The files of an index and then the index; of another path the path itself. Raises WeightsError."""
    return list(dict.fromkeys([*list_files(path), path]))


def make_weight_file(version: int, path: Path) -> WeightFile:
    """The file, or the files of an index, as version `version`, published now: their hashes are computed, and none is
    held in memory. Raises OSError, and WeightsError for a damaged index."""
    digest = hash_file(path)
    parts = [WeightPart(file, digest if file == path else hash_file(file)) for file in list_files(path)]
    return WeightFile(version, path, digest, time.time(), parts=parts, is_verified=True)


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each read when it is asked for. files: where each one is"""

    files: Mapping[str, Any]

    def __contains__(self, name: object) -> bool:  # Mapping would read it
        return name in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


class TensorFiles(LazyTensors):
    """The tensors of several files by name, each read when it is asked for, into memory of its own.

    files: which one has each

    A file is opened for each tensor: what is mapped stays in no process. Raises WeightsError for a file that is
    missing or damaged, and for a name in two files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files: dict[str, Path] = {}
        for path in paths:
            for name in sorted(_open(path).keys()):
                if name in self.files:
                    raise WeightsError(f"{name!r} is in {self.files[name]} and in {path}")
                self.files[name] = path

    def _open(self, name: str) -> Any:
        """The file with this tensor."""
        return _open(self.files[name])

    def __getitem__(self, name: str) -> Tensor:
        result: Tensor = self._open(name).get_tensor(name)
        return result.clone()  # in the file it is misaligned, which changes the last digits of products

    def describe(self) -> TensorTypes:
        """Dtype and shape of each tensor, of which none is read."""
        slices = {name: self._open(name).get_slice(name) for name in self.files}
        return {name: (DTYPES[each.get_dtype()], torch.Size(each.get_shape())) for name, each in slices.items()}

    def get_shape(self, name: str) -> torch.Size:
        """The shape of a tensor, which is not read."""
        return torch.Size(self._open(name).get_slice(name).get_shape())

    def read_part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """The part of a tensor with these slices; nothing else of it is read."""
        result: Tensor = self._open(name).get_slice(name)[part]
        return result.clone()


class VersionTensors(TensorFiles):
    """The tensors of a version, whose files are verified, or downloaded from a bucket, each before its first tensor is
    read. Which file of a bucket has a tensor is known by the index. Raises WeightsError."""

    def __init__(self, file: WeightFile) -> None:
        self._file, self._parts = file, {part.path: part for part in file.parts}
        self._unverified = set(self._parts)
        if file.origin is None:
            super().__init__([*self._parts])
        elif file.has_index:
            self.files = {name: Path(each) for name, each in _read_index(file.find(file.index)).items()}
            if strange := set(self.files.values()) - self._parts.keys():
                raise WeightsError(f"the index of version {file.version} names {strange.pop()}, which it lacks")
        else:
            super().__init__([file.find(file.index)])
            self.files = dict.fromkeys(self.files, file.path)

    def _open(self, name: str) -> Any:
        part = self._parts[self.files[name]]
        if part.path in self._unverified:
            self._file.verify_part(part)
            self._unverified.discard(part.path)
        return _open(self._file.find(part))


def open_tensors(paths: Sequence[Path]) -> TensorFiles:
    """The tensors of these files, none of which is read yet. Raises WeightsError."""
    return TensorFiles(paths)


def open_weight_file(file: WeightFile) -> TensorFiles:
    """The tensors of a version, whose files are verified, and then not read yet. Raises WeightsError."""
    file.verify()
    return open_tensors([file.find(part) for part in file.parts])


def read_tensors(snapshot: WeightSnapshot) -> dict[str, Tensor]:
    """The tensors by name; they share memory with nothing. Raises WeightsError when checksum or format do not fit.

    A file is read once: neither its bytes nor a mapping are copied on the way, and its hash, where it was not verified
    before, is computed of the same bytes.
    """
    try:
        if isinstance(snapshot, WeightFile):
            parts = [_read_part(snapshot, part) for part in snapshot.parts]
            return {name: tensor for part in parts for name, tensor in part.items()}
        snapshot.verify()
        return _read_payload(snapshot.payload)
    except OSError as error:
        raise WeightsError(f"weights version {snapshot.version} cannot be read ({error}): {REMEDY}") from error
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        snapshot.verify()
        raise WeightsError(f"weights version {snapshot.version} are not safetensors: {error}") from None


def _read_payload(payload: bytes) -> dict[str, Tensor]:
    """Tensor by tensor, outside of Python's lock: `safetensors.torch.load` keeps it for all of them, and with it every
    answer of an endpoint: 200 ms for 250 MB."""
    described, start = decode_header(payload)
    result: dict[str, Tensor] = {}
    for name, each in described.items():
        (begin, end), dtype = each["data_offsets"], DTYPES[each["dtype"]]
        if begin < 0 or end - begin != math.prod(each["shape"]) * dtype.itemsize:
            raise ValueError(f"{name!r} has {end - begin} bytes")
        result[name] = torch.empty(each["shape"], dtype=dtype)
        into: Any = result[name].reshape(-1).view(torch.uint8).numpy()
        into[:] = np.frombuffer(memoryview(payload)[start:][begin:end], np.uint8)
    return result


def _read_part(file: WeightFile, part: WeightPart) -> dict[str, Tensor]:
    """A mapping of the file says which tensors there are. It is not read: in it they are misaligned, which changes the
    last digits of products. What need not be hashed is read by as many threads as torch computes with here."""
    path, digest = file.find(part), hashlib.sha256()
    mapped = safetensors.torch.load_file(path)
    result: dict[str, Tensor] = {}
    with path.open("rb", buffering=0) as opened:

        def read(piece: tuple[Any, int]) -> None:
            """Fill an array with the file's bytes from an offset on."""
            array, offset = piece
            while len(array):
                if (count := os.preadv(opened.fileno(), [array], offset)) == 0:
                    raise WeightsError(f"{path} was cut off while it was read")
                array, offset = array[count:], offset + count

        header = opened.read(8)
        header += opened.read(int.from_bytes(header, "little"))
        digest.update(header)
        described, start = decode_header(header)
        pieces: list[tuple[Any, int]] = []
        for name in sorted(mapped, key=lambda name: described[name]["data_offsets"]):
            result[name] = torch.empty_like(mapped[name])
            payload: Any = result[name].reshape(-1).view(torch.uint8).numpy()
            offset = start + described[name]["data_offsets"][0]
            pieces += [(payload[at : at + PIECE_BYTES], offset + at) for at in range(0, len(payload), PIECE_BYTES)]
        if file.is_verified and len(pieces) > 1:
            with ThreadPoolExecutor(torch.get_num_threads()) as threads:
                any(threads.map(read, pieces))
        else:
            for piece in pieces:
                read(piece)
                if not file.is_verified:
                    digest.update(piece[0])
    if not file.is_verified and digest.hexdigest() != part.sha256:
        raise file.describe_damage(part.path)
    return result


def _read_index(path: Path) -> dict[str, str]:
    """The name of each tensor's file. Raises WeightsError."""
    try:
        names = dict(json.loads(path.read_bytes())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{path} cannot be read as an index of safetensors files ({error!r})") from error
    for each in names.values():
        if Path(str(each)).name != each or not each.endswith(".safetensors"):
            raise WeightsError(f"{path} names {each!r}, which is no file of safetensors beside it")
    return names


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} cannot be read as safetensors: {error}") from error


def _divide(path: Path, types: TensorTypes) -> dict[Path, list[str]]:
    """The names of the tensors of each file, in the order of `types`."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, (dtype, shape) in types.items():
        size_bytes = math.prod(shape) * dtype.itemsize
        if groups[-1] and used + size_bytes > MAX_FILE_BYTES:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size_bytes
    if len(groups) == 1:
        return {path: groups[0]}
    return {
        path.with_name(f"{path.stem}-{number:05d}-of-{len(groups):05d}{path.suffix}"): names
        for number, names in enumerate(groups, 1)
    }


def _write_headers(files: Mapping[Path, Sequence[str]], types: TensorTypes) -> dict[str, tuple[Path, int]]:
    """Begin each file; returns the place of each tensor's bytes."""
    locations = {}
    for file, names in files.items():
        for name in names:
            if types[name][0] not in _PLACES:
                raise WeightsError(f"{name!r} is {types[name][0]}, which safetensors files do not hold")
        ordered = sorted(((name, *types[name]) for name in names), key=lambda each: (_PLACES[each[1]], each[0]))
        head = encode_header(
            (name, DTYPE_NAMES[dtype], shape, math.prod(shape) * dtype.itemsize) for name, dtype, shape in ordered
        )
        create_private(file).write_bytes(head)
        described, start = decode_header(head)
        locations.update({name: (file, start + each["data_offsets"][0]) for name, each in described.items()})
    return locations


def _write_index(path: Path, files: Mapping[Path, Sequence[str]], types: TensorTypes) -> Path:
    total_size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in types.values())
    weight_map = {name: file.name for file, names in files.items() for name in names}
    index = path.with_name(path.name + INDEX_SUFFIX)
    replace_synced(
        index, json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}, indent=2).encode()
    )
    return index
