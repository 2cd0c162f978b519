"""A store that does not answer for a while."""

from __future__ import annotations

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
