"""The datasets in files that this library adds to `shoal.data.formats`."""

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
