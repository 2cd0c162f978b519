"""A short fingerprint of a dataset: two runs with the same fingerprint have read the same data.

Called when a model is registered. It covers:

    files        as map-style; the place, dtype and shape of each field; and of every file its size and its content:
                 the first and last MiB and 32 blocks of 64 KiB between them (of more than 64 files, of 64 evenly
                 spaced). Not its name, path or time
    map-style    class name, number of samples, and 64 samples evenly spaced, with seeded random numbers
    iterable     class name and length, if it has one: nothing is read, because reading may not be repeatable

A dataset with `fingerprint() -> str` supplies its own. Changes between the read places are not detected. Objects in a
sample that are not a number, text, array or dataclass count by their class only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.dataset import Source, is_iterable, length_of
from shoal.data.file_dataset import FileDataset
from shoal.data.readers.map_reader import make_read_error
from shoal.random_state import preserve_rng, seed_all
from shoal.store import fetch, get_size_bytes

_END_BYTES = 2**20
_BLOCK_BYTES = 64 * 1024
_NUM_BLOCKS = 32
_NUM_SAMPLES = 64


def fingerprint(source: Source) -> str:
    """16 hexadecimal digits. Raises DataError when the data cannot be read."""
    digest = hashlib.sha256()
    if callable(getattr(source, "fingerprint", None)):
        _add(digest, str(source.fingerprint()))
    elif is_iterable(source):
        _add(digest, [type(source).__name__, length_of(source)])
    else:
        _add(digest, [type(source).__name__, len(source)])
        if isinstance(source, FileDataset):
            _add(digest, source.shapes())
            _add(digest, [get_size_bytes(path) for path in source.paths])
            read = [source.paths[position] for position in _pick_positions(len(source.paths))]
            fetch(read)
            for path in read:
                size_bytes = path.stat().st_size
                with path.open("rb") as file:
                    digest.update(file.read(_END_BYTES))
                    last = max(size_bytes - _END_BYTES, _END_BYTES)
                    for at in np.linspace(_END_BYTES, last, _NUM_BLOCKS).astype(int).tolist():
                        file.seek(at)
                        digest.update(file.read(_BLOCK_BYTES))
                    file.seek(max(size_bytes - _END_BYTES, 0))
                    digest.update(file.read(_END_BYTES))
        with preserve_rng(has_cuda=False):
            for index in _pick_positions(len(source)):
                seed_all(0, 0, index)
                whole = not hasattr(source, "__getitem__")
                try:
                    sample = source.batch(np.array([index])) if whole else source[index]
                except Exception as error:  # user code may raise anything; the error names the sample
                    raise make_read_error(error, source, np.array([index])) from error
                _add(digest, sample)
    return digest.hexdigest()[:16]


def _pick_positions(count: int) -> list[int]:
    """At most 64 indices, evenly spaced over `count`."""
    return list(dict.fromkeys(np.linspace(0, count - 1, min(count, _NUM_SAMPLES)).astype(int).tolist()))


def _add(digest: Any, value: Any) -> None:
    """Add a value in a form that does not depend on the machine, and that differs for different values."""
    if isinstance(value, Tensor) and value.is_nested:
        _add(digest, value.unbind())
    elif isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value if value.layout is torch.strided else value.to_dense()).resolve_conj().resolve_neg()
        values = value.contiguous().reshape(-1).view(torch.uint8).numpy() if value.numel() else np.empty(0)
        digest.update(f"tensor {value.dtype} {tuple(value.shape)};".encode() + values.tobytes())
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:  # its bytes are addresses
        digest.update(f"objects {value.shape};".encode())
        _add(digest, value.reshape(-1).tolist())
    elif isinstance(value, np.ndarray | np.generic):
        digest.update(f"array {value.dtype.str} {value.shape};".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        digest.update(f"dict {len(value)};".encode())
        for name in sorted(value, key=str):
            _add(digest, [str(name), value[name]])
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)};".encode())
        for each in value:
            _add(digest, each)
    elif isinstance(value, bytes | str | int | float | complex | None):
        digest.update(f"{type(value).__name__} {value!r};".encode())
    else:
        digest.update(f"{type(value).__name__};".encode())
        if is_dataclass(value):
            _add(digest, {field.name: getattr(value, field.name) for field in fields(value)})
        elif hasattr(value, "__array__") or hasattr(value, "__array_interface__"):  # a picture, say
            _add(digest, np.asarray(value))
