"""Immutable objects of a store as files of this host, by their hash, each downloaded once."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from shoal.atomic_file import make_folder
from shoal.errors import StoreError
from shoal.home import home
from shoal.store.store import Store

CAPACITY_BYTES = 100 << 30  # of all files together; those used longest ago are removed


class BlobCache:
    """Files below `folder` (`$SHOAL_HOME/cache` when None), which any number of processes share.

    A file that is removed while a process has it open or mapped stays readable to that process.
    """

    def __init__(self, folder: Path | None = None, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.folder = home() / "cache" if folder is None else folder
        self._capacity_bytes = capacity_bytes

    def fetch(self, store: Store, key: str, sha256: str) -> Path:
        """The file of an object with this hash; the store's own file where it is a folder.

        Raises FileNotFoundError, and StoreError when the store cannot be reached or the object has another hash.
        """
        if (own := store.locate(key)) is not None:
            return own
        path = self.folder / sha256[:2] / sha256
        try:
            os.utime(path)  # used now
            return path
        except FileNotFoundError:
            make_folder(path.parent)
        draft = path.with_name(f".{sha256[:16]}-{secrets.token_hex(8)}")
        try:
            store.download(key, draft)
            if (found := _hash(draft)) != sha256:
                raise StoreError(f"{key} in {store.url} is damaged: its hash is {found}, not {sha256}")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        self._evict(path)
        return path

    def forget(self, sha256: str) -> None:
        """Remove a file, which is damaged."""
        (self.folder / sha256[:2] / sha256).unlink(missing_ok=True)

    def _evict(self, newest: Path) -> None:
        found = [(status.st_mtime, status.st_size, path) for path in self.folder.glob("*/*") if (status := _stat(path))]
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._capacity_bytes:
                return
            if path != newest:
                path.unlink(missing_ok=True)
                total -= size


def _stat(path: Path) -> os.stat_result | None:
    """None for one that another process has removed meanwhile."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
