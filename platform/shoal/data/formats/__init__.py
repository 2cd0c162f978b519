"""Dataset formats on disk: map-style, opened in the reading process, a batch at a time. And Ray Data, an iterable.

Each is imported at its first use, to load only its own libraries.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.data.formats.arrow import Arrow, Parquet
    from shoal.data.formats.hdf5 import Hdf5
    from shoal.data.formats.idx import Idx
    from shoal.data.formats.image_folder import ImageFolder
    from shoal.data.formats.numpy_files import NumpyFiles
    from shoal.data.formats.ray_data import RayData

__all__ = ["Arrow", "Hdf5", "Idx", "ImageFolder", "NumpyFiles", "Parquet", "RayData"]

_MODULES = {
    "Arrow": "arrow",
    "Hdf5": "hdf5",
    "Idx": "idx",
    "ImageFolder": "image_folder",
    "NumpyFiles": "numpy_files",
    "Parquet": "arrow",
    "RayData": "ray_data",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
