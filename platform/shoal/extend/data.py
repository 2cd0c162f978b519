"""Data, for libraries: datasets and loaders."""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.data import Batch, Data, Loader
    from shoal.data.dataset import length_of
    from shoal.data.file_dataset import FileDataset
    from shoal.data.fingerprint import fingerprint
    from shoal.data.formats import ImageFolder
    from shoal.data.loader import load_first_batch, make_loader
    from shoal.data.sampling.sampler import Indices, RankShare

__getattr__ = load_on_demand(__name__)
