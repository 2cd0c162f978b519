"""What every store has: whole objects by key, conditional writes, listings. No rename, no lock, no partial write.

Owns the interface and the read-modify-write loop over it. A key is a relative path of `/`-separated names; no name
begins with a dot. An object appears complete or not at all.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from shoal.errors import StoreError

MAX_UPDATES = 200  # of one object by concurrent writers, each of which wins once
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0

TaggedUpdate = Callable[[bytes | None], bytes | None]


class KeyTaken(StoreError):
    """An object that was to be created exists."""


class KeyChanged(StoreError):
    """An object that was to be replaced is no longer the one that was read."""


class StoreAway(StoreError):
    """The store does not answer: a later attempt may succeed."""


class Entry(NamedTuple):
    """One object of a listing. `modified_s` is in seconds since the epoch, by the clock of the store.

    tag: of this content, as `read_tagged` has it; "" where the store is a folder, which would have to read the file
    """

    key: str
    size_bytes: int
    modified_s: float
    tag: str = ""


class Tagged(NamedTuple):
    """An object with the tag that its next `replace` must name."""

    payload: bytes
    tag: str


class Store(ABC):
    """Objects below one URL. Every method may be called from any thread.

    All raise StoreError, an OSError too, when the store refuses, or cannot be reached until the deadline of the call;
    what is missing is a FileNotFoundError.
    """

    url: str

    @abstractmethod
    def read_tagged(self, key: str) -> Tagged:
        """The object and its tag. Raises FileNotFoundError."""

    @abstractmethod
    def download(self, key: str, path: Path, tag: str = "") -> str:
        """Write the object to a new file, without holding all of it in memory; returns its SHA-256.

        Raises FileNotFoundError, and KeyChanged when the object has another tag than `tag`, if that is given.
        """

    @abstractmethod
    def open_reader(self, key: str) -> BinaryIO:
        """The object as a file, of which what is read is transferred. Raises FileNotFoundError."""

    @abstractmethod
    def write(self, key: str, content: bytes | Path) -> None:
        """Create or overwrite the object, from memory or from a file."""

    @abstractmethod
    def copy(self, source: str, target: str) -> None:
        """Create or overwrite the object `target`, at the store's side. Raises FileNotFoundError."""

    @abstractmethod
    def create(self, key: str, payload: bytes) -> None:
        """Create the object. Raises KeyTaken when there is one: of several concurrent calls one succeeds."""

    @abstractmethod
    def replace(self, key: str, payload: bytes, tag: str) -> None:
        """Overwrite the object if it still has this tag. Raises KeyChanged when it has not, or is gone."""

    @abstractmethod
    def find(self, key: str) -> Entry:
        """The object's entry, as a listing has it. Raises FileNotFoundError."""

    @abstractmethod
    def list_entries(self, folder: str = "") -> list[Entry]:
        """All objects below a folder, at any depth, ordered by key."""

    @abstractmethod
    def list_folders(self, folder: str = "") -> list[str]:
        """The names of the folders directly below a folder, ordered."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; missing ones are ignored."""

    @abstractmethod
    def open_folder(self, folder: str) -> Store:
        """The part of this store below a folder."""

    def without_waiting(self) -> Store:
        """This store for callers that must not wait while it is away: they hear it within seconds."""
        return self

    def read(self, key: str) -> bytes:
        """The object. Raises FileNotFoundError."""
        return self.read_tagged(key).payload

    def remove_drafts(self, older_than_s: float) -> None:
        """Remove what writers that were killed so long ago left, where the store can list it."""
        return

    def locate(self, key: str) -> Path | None:
        """The object's file, where the store is a folder of this host; else None."""
        return None


def update(store: Store, key: str, change: TaggedUpdate) -> bytes | None:
    """Replace an object by `change` of it, again until no concurrent writer interferes; returns what is now there.

    change: from the payload, or None without an object, to the new payload, or None to leave it as it is

    Raises StoreError after `MAX_UPDATES` attempts, and what `change` raises.
    """
    pause_s = _FIRST_PAUSE_S
    for _ in range(MAX_UPDATES):
        try:
            result: Tagged | None = store.read_tagged(key)
        except FileNotFoundError:
            result = None
        payload = change(None if result is None else result.payload)
        if payload is None:
            return None if result is None else result.payload
        try:
            if result is None:
                store.create(key, payload)
            else:
                store.replace(key, payload, result.tag)
        except (KeyTaken, KeyChanged):
            time.sleep(random.uniform(0, pause_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        else:
            return payload
    raise StoreError(f"{key} in {store.url} is written by too many others; try again")
