"""Ledgers that a test leaves open, as those of a process that was killed.

Python 3.13 warns of a connection to SQLite that is collected before it was closed; these are closed by being collected.
"""

import sqlite3
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest

from shoal.rl.experience import segment_ledger


class _ClosedWhenCollected(sqlite3.Connection):
    def __del__(self) -> None:
        self.close()


@pytest.fixture(scope="module")
def ledgers_may_stay_open() -> Iterator[None]:
    """For the tests of a module."""
    connect = partial(sqlite3.connect, factory=_ClosedWhenCollected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_ledger, "sqlite3", SimpleNamespace(**vars(sqlite3) | {"connect": connect}))
        yield
