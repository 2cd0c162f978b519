"""Data loading: datasets of a Task, the order of their samples, and loaders that keep the device busy.

Libraries add names, such as `table`, in the group `shoal.data_names`."""

from typing import Any

from shoal.errors import needs_extra
from shoal.plugins.find import find_optional

with needs_extra("cluster"):
    from shoal.data.dataset import Batch, Collate, Data, Source
    from shoal.data.fingerprint import fingerprint
    from shoal.data.loader import Loader
    from shoal.data.loader_spec import LoaderSpec

__all__ = ["Batch", "Collate", "Data", "Loader", "LoaderSpec", "Source", "fingerprint"]


def __getattr__(name: str) -> Any:
    found = None if name.startswith("_") else find_optional(name, "shoal.data_names")
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
