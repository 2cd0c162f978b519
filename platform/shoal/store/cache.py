"""Immutable objects of a store as files of this host, by their hash, each downloaded once."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from shoal.atomic_file import make_folder, move_synced
from shoal.errors import StoreError
from shoal.home import home
from shoal.store.store import Store

CAPACITY_BYTES = 100 << 30  # of all files together; those used longest ago are removed
_VERIFIED_S = 1.0  # the modification time of a file with its hash: whatever writes to it later changes the time


class BlobCache:
    """Files below `folder` (`$SHOAL_HOME/cache` when None), which any number of processes share.

    A file is verified once, when it is downloaded; a change since then is noticed by its modification time. Its time of
    access is that of its last use. One that is removed while a process has it open stays readable to that process.
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
        if (status := _stat(path)) and status.st_mtime == _VERIFIED_S:
            with suppress(FileNotFoundError):  # another process has removed it meanwhile
                os.utime(path, (time.time(), _VERIFIED_S))
                return path
        make_folder(path.parent)
        draft = path.with_name(f".{sha256[:16]}-{secrets.token_hex(8)}")
        try:
            if (found := store.download(key, draft)) != sha256:
                raise StoreError(f"{key} in {store.url} is damaged: its hash is {found}, not {sha256}")
            os.utime(draft, (time.time(), _VERIFIED_S))
            with draft.open("rb") as file:  # a power cut must not leave the name without the content
                os.fsync(file.fileno())
            move_synced(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        self._evict(path)
        return path

    def _evict(self, newest: Path) -> None:
        found = [(status.st_atime, status.st_size, path) for path in self.folder.glob("*/*") if (status := _stat(path))]
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
