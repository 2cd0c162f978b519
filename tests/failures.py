"""A store that is down, and a disk that is full, for a while."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Never

import pytest

from shoal.errors import StoreError
from shoal.store import Store


@contextmanager
def down(store: Store, *methods: str) -> Iterator[None]:
    """In the block these methods fail, of all stores of its kind; by default, nothing can be written."""

    def refuse(this: Store, *_: object) -> Never:
        raise StoreError(f"{this.url} cannot be used: the store is down")

    with pytest.MonkeyPatch.context() as patch:
        for name in methods or ("write",):
            patch.setattr(type(store), name, refuse)
        yield


@contextmanager
def full_disk(size_bytes: int) -> Iterator[None]:
    """In the block, the disk takes so much of a file, as one that becomes full does."""
    limit, highest = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, highest))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, highest))
