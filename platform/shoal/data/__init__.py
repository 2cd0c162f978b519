"""Input that does not starve the device: what a Task's data is, in which order it comes, and how it is loaded."""

from shoal.data.dataset import Batch, Collate, Data, Source
from shoal.data.fingerprint import fingerprint
from shoal.data.loader import Loader
from shoal.data.loader_spec import LoaderSpec

__all__ = ["Batch", "Collate", "Data", "Loader", "LoaderSpec", "Source", "fingerprint"]
