"""HDF5 files (h5py): opened in the reading process; a batch is read in a few ranges of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import DataError, needs_extra
from shoal.extend.data import Indices
from shoal.libs.files.fields import FieldDataset, Fields, check_equal_lengths, parse_fields, require_path

with needs_extra("data"):
    import h5py

_RUN_GAP_BYTES = 64 * 1024  # reading a gap of this size is faster than another call of the library
_READ_BYTES = 64 * 2**20  # at most, at once: skipped rows take memory, too


class Hdf5(FieldDataset):
    """Rows of datasets in one HDF5 file: `Hdf5(path, {"inputs": "images", "target": "labels"})`.

    A mapping gives batches that are dicts, a list of datasets tuples in that order. cache_bytes: of unpacked chunks,
    in each process and for each dataset. Chunks of a few rows suit a shuffled order best.
    """

    def __init__(self, path: str | Path, fields: Fields, cache_bytes: int = 64 * 2**20) -> None:
        file_path = require_path(path)
        self.locations, self.as_dict = parse_fields(fields)
        self.cache_bytes = cache_bytes
        with _open_file(file_path, cache_bytes) as file:
            found = {name: _get_dataset(file, location, file_path) for name, location in self.locations.items()}
            self._shapes = {
                name: f"{each.dtype.name}{each.shape[1:]} of {self.locations[name]}" for name, each in found.items()
            }
            num_samples = check_equal_lengths({name: each.shape[0] for name, each in found.items()}, file_path)
        super().__init__([file_path], num_samples)

    def _read(self, field: Any, indices: Indices) -> np.ndarray[Any, Any]:
        return _read_rows(field, indices)

    def _open(self) -> dict[str, Any]:
        file = _open_file(self.paths[0], self.cache_bytes)
        return {name: file[location] for name, location in self.locations.items()}


def _open_file(path: Path, cache_bytes: int) -> Any:
    try:
        return h5py.File(path, "r", rdcc_nbytes=cache_bytes)
    except OSError as error:
        raise DataError("path", str(path), f"cannot be opened as HDF5 ({error})", "is it whole?") from error


def _get_dataset(file: Any, location: str, path: Path) -> Any:
    result = file.get(location)
    if not isinstance(result, h5py.Dataset):
        there: list[str] = []
        file.visititems(lambda name, each: there.append(name) if isinstance(each, h5py.Dataset) else None)
        raise DataError("fields", location, f"is no dataset in {path.name}", f"there are: {', '.join(there) or 'none'}")
    if not result.shape:
        raise DataError("fields", location, f"has no rows: it is a single value in {path.name}")
    if result.dtype.kind not in "biuf":
        remedy = "store rows of equal length, of a number type"
        raise DataError("fields", location, f"is ragged or no numbers: its dtype is {result.dtype}", remedy)
    return result


def _read_rows(dataset: Any, indices: Indices) -> np.ndarray[Any, Any]:
    """The rows in the order of `indices`, read in runs: sorted, and split where a gap is worth it or a run is large."""
    row_bytes = max(dataset.dtype.itemsize * int(np.prod(dataset.shape[1:])), 1)
    gap = dataset.chunks[0] if dataset.chunks else max(_RUN_GAP_BYTES // row_bytes, 1)
    order = np.argsort(indices, kind="stable")
    places = indices[order].tolist()
    rows = np.empty((len(indices), *dataset.shape[1:]), dataset.dtype)
    start, most = 0, max(_READ_BYTES // row_bytes, 1)
    for end in range(1, len(places) + 1):
        if end < len(places) and places[end] - places[end - 1] <= gap and places[end] - places[start] < most:
            continue
        part, start = slice(start, end), end
        first, last = int(places[part.start]), int(places[part.stop - 1])
        try:
            block = dataset[first : last + 1]
        except OSError as error:
            raise DataError("path", dataset.file.filename, f"cannot be read ({error})", "is it whole?") from error
        rows[order[part]] = block[indices[order[part]] - first]
    return rows
