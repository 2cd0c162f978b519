"""Data loading: datasets of a Task, the order of their samples, and loaders that keep the device busy."""

from shoal.errors import needs_extra

with needs_extra("cluster"):
    from shoal.data.dataset import Batch, Collate, Data, Source
    from shoal.data.fingerprint import fingerprint
    from shoal.data.loader import Loader
    from shoal.data.loader_spec import LoaderSpec

__all__ = ["Batch", "Collate", "Data", "Loader", "LoaderSpec", "Source", "fingerprint"]
