"""A first batch of a dataset, to see what it is made of; the order in which a run is fed stays untouched.

Called before a run, and when a model is spread over ranks. Reads in this process.
"""

from __future__ import annotations

from shoal.data.dataset import Batch, Collate, Source
from shoal.data.loader import Loader


def example_batch(source: Source, collate: Collate | None, num_samples: int) -> Batch:
    """The first `num_samples` samples (or as many as there are) as a batch. Raises DataError."""
    with Loader(source, batch_size=num_samples, collate=collate, shuffle=False, drop_last=False) as loader:
        return next(iter(loader))
