"""Datasets in files: map-style, opened in the reading process, a batch at a time. And Ray Data, an iterable.

`shoal.data.formats` has them by name. Each is imported at its first use, to load only its own packages.
"""

from shoal.plugins.library import Library

_MODULES = {
    "Arrow": "arrow",
    "Hdf5": "hdf5",
    "Idx": "idx",
    "ImageFolder": "image_folder",
    "NumpyFiles": "numpy_files",
    "Parquet": "arrow",
    "RayData": "ray_data",
}
LIBRARY = Library(
    "files",
    extensions={"shoal.data_formats": {name: f"shoal.libs.files.{module}:{name}" for name, module in _MODULES.items()}},
)
