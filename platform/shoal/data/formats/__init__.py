"""Datasets as they lie on disk. All are map-style, open their files where they read, and give whole batches."""

from shoal.data.formats.idx import Idx

__all__ = ["Idx"]
