"""A first batch of a dataset, to see what it is made of; the order in which a run is fed stays untouched.

Called before a run, and when a model is spread over ranks. Reads in this process.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
from torch.utils.data import default_collate

from shoal.data.order import MapRequest
from shoal.data.reader import Inline, Made, MapReader
from shoal.data.source import Batch, Collate, Source, is_iterable
from shoal.errors import DataError


def example_batch(source: Source, collate: Collate | None, num_samples: int) -> Batch:
    """The first `num_samples` samples (or as many as there are) as a batch. Raises DataError."""
    if is_iterable(source):
        samples = list(islice(iter(source), num_samples))
        if not samples:
            raise DataError("data", type(source).__name__, "is empty")
        return (collate or default_collate)(samples)
    count = min(num_samples, len(source))
    if not count:
        raise DataError("data", type(source).__name__, "is empty")
    inline = Inline(MapReader(source, collate, seed=0))
    inline.restart(iter([MapRequest(0, 0, count, count, np.arange(count))]))
    made = inline.next()
    assert isinstance(made, Made)
    return made.batch
