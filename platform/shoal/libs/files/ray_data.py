"""Ray Data as a source. Ray loads, in its own processes; this adapts its output to a source of batches.

Imports no Ray: any object with `iter_torch_batches` will do.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

from shoal.errors import ConfigError
from shoal.extend.data import RankShare


class RayData:
    """This rank's shard of a Ray dataset: `RayData(ray.train.get_dataset_shard("train"))`.

    shard:          a `DataIterator` of this rank; a full `Dataset` if there is one rank
    columns:        the columns of a batch; None: all
    shuffle_buffer: rows from which Ray picks at random; 0: in its order. The seed is the epoch
    Batches are dicts of tensors. Ray saves no position within an epoch: a resume skips the earlier batches by reading
    them, which is exact if Ray's order is (`preserve_order` of its ExecutionOptions, and no shuffling upstream).
    """

    def __init__(self, shard: Any, columns: Sequence[str] | None = None, shuffle_buffer: int = 0) -> None:
        if not hasattr(shard, "iter_torch_batches"):
            remedy = "give ray.train.get_dataset_shard(...) or a ray.data.Dataset"
            raise ConfigError("shard", type(shard).__name__, "has no iter_torch_batches", remedy)
        self.shard = shard
        self.columns = columns
        self.shuffle_buffer = shuffle_buffer

    def batches(self, batch_size: int, *, epoch: int, drop_last: bool, share: RankShare) -> Iterator[dict[str, Any]]:
        """This rank's batches of one epoch. Raises ConfigError for a full dataset that several ranks would repeat."""
        if share.size > 1 and hasattr(self.shard, "streaming_split"):
            problem = f"is a whole dataset, and each of {share.size} ranks needs a shard of its own"
            remedy = f"ray.train.get_dataset_shard(...), or streaming_split({share.size}, equal=True)[rank]"
            raise ConfigError("shard", type(self.shard).__name__, problem, remedy)
        # Not to the GPU that Ray may have assigned to this process: the loader copies batches to the run's device.
        options: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last, "device": "cpu"}
        if self.shuffle_buffer:
            options |= {"local_shuffle_buffer_size": self.shuffle_buffer, "local_shuffle_seed": epoch}
        batches = iter(self.shard.iter_torch_batches(**options))
        try:
            for batch in batches:
                missing = [name for name in self.columns or () if name not in batch]
                if missing:
                    raise ConfigError("columns", missing, "are not in the dataset", f"there are: {', '.join(batch)}")
                yield {name: batch[name] for name in self.columns or batch}
        finally:
            if isinstance(batches, Generator):
                batches.close()  # ends its executor while Ray is still running
