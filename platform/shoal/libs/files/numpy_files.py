"""NumPy's own files: `.npy` is memory-mapped, an array in an `.npz` is read into memory on use."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from shoal.errors import DataError
from shoal.libs.files.fields import FieldDataset, check_equal_lengths, name_positions, require_path

_REMEDY = "save an array of numbers with the sample as dimension 0"
_READ_ERRORS = (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error)
_Location = tuple[Path, str]  # a file, and the array's name in an .npz


class NumpyFiles(FieldDataset):
    """Arrays of equal length, the sample as dimension 0.

    NumpyFiles({"inputs": "x.npy", "target": "y.npy"})   batches are dicts
    NumpyFiles(["x.npy", "data.npz:y"])                  batches are tuples; `:y` names an array of an .npz
    NumpyFiles("data.npz")                               a dict of all its arrays
    """

    def __init__(self, fields: str | Path | Mapping[str, str | Path] | Sequence[str | Path]) -> None:
        self._locations: dict[str, _Location]
        if isinstance(fields, str | Path):
            path = require_path(fields)
            if path.suffix == ".npy":
                raise DataError("fields", str(fields), "holds one array, without a name", "give a list: [path]")
            self._locations = {name: (path, name) for name in _list_names(path)}
        else:
            locations = fields if isinstance(fields, Mapping) else name_positions(fields)
            self._locations = {name: _parse_location(location) for name, location in locations.items()}
        self.as_dict = isinstance(fields, str | Path | Mapping)
        if not self._locations:
            raise DataError("fields", fields, "names no array")
        heads = {name: _read_head(location) for name, location in self._locations.items()}
        within = {name: f" of {array}" if array else "" for name, (_, array) in self._locations.items()}
        self._shapes = {name: f"{dtype.name}{shape[1:]}{within[name]}" for name, (shape, dtype) in heads.items()}
        paths = list(dict.fromkeys(path for path, _ in self._locations.values()))
        super().__init__(paths, check_equal_lengths({name: shape[0] for name, (shape, _) in heads.items()}, paths[0]))

    def _open(self) -> dict[str, np.ndarray[Any, Any]]:
        return {name: _load_array(location) for name, location in self._locations.items()}


def _parse_location(text: str | Path) -> _Location:
    path, separator, name = str(text).rpartition(":")
    if separator and path.endswith(".npz"):
        return require_path(path), name
    file = require_path(text)
    if file.suffix != ".npz":
        return file, ""
    names = _list_names(file)
    if len(names) != 1:
        raise DataError("fields", str(text), f"holds {', '.join(names) or 'nothing'}", f"say which: {text}:NAME")
    return file, names[0]


def _list_names(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except _READ_ERRORS as error:
        raise _make_damage_error(path, error) from error


def _read_head(location: _Location) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype, without reading the array. Raises DataError when it cannot be one of samples."""
    path, name = location
    try:
        if not name:
            _require_npy(path)
            array = np.load(path, mmap_mode="r")
            shape, dtype = array.shape, array.dtype
        else:
            with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
                version = npy.read_magic(file)
                read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                shape, _, dtype = read(file)
    except KeyError as error:
        raise DataError("fields", name, f"is not in {path.name}", f"there is {', '.join(_list_names(path))}") from error
    except _READ_ERRORS as error:
        if "Python objects" in str(error):  # they cannot be mapped, and are not read
            raise DataError("fields", name or str(path), "holds Python objects, no numbers", _REMEDY) from error
        raise _make_damage_error(path, error) from error
    if not shape or dtype.kind not in "biuf":
        raise DataError("fields", name or str(path), f"is ragged or no numbers: {dtype}, shape {shape}", _REMEDY)
    return shape, dtype


def _require_npy(path: Path) -> None:
    """Without this, NumPy would read a zip as an .npz, and anything else as a pickle. Raises DataError."""
    with path.open("rb") as file:
        magic = file.read(len(npy.MAGIC_PREFIX))
    if magic != npy.MAGIC_PREFIX:
        remedy = "name it .npz, if that is what it is" if magic[:2] == b"PK" else "write it with numpy.save"
        raise DataError("path", str(path), f"is no .npy file (it begins with {magic.hex() or 'nothing'})", remedy)


def _load_array(location: _Location) -> np.ndarray[Any, Any]:
    path, name = location
    try:
        if not name:
            mapped: np.ndarray[Any, Any] = np.load(path, mmap_mode="r")
            return mapped
        with np.load(path) as archive:
            array: np.ndarray[Any, Any] = archive[name]
            return array
    except _READ_ERRORS as error:
        raise _make_damage_error(path, error) from error


def _make_damage_error(path: Path, error: Exception) -> DataError:
    return DataError("path", str(path), f"is truncated or damaged ({error})", "write or fetch the file again")
