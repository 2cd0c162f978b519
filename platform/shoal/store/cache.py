"""Objects of a store as files of this host: each version of an object is downloaded once."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from shoal.atomic_file import make_folder
from shoal.errors import StoreError
from shoal.home import file_lock, home, read_number_variable
from shoal.store.store import Entry, Store

CAPACITY_GIB = 100.0  # of all files together; those used longest ago are removed
LOCK_TIMEOUT_S = 3600.0  # for another process that downloads the same file
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class BlobCache:
    """Files below `folder` (`$SHOAL_HOME/cache` when None), which any number of processes share.

    capacity_bytes: None: `$SHOAL_CACHE_GIB`, else 100 GiB

    A file of a hash is verified when it is downloaded, and once after each start of the host: what no `fsync` has
    secured is lost by a power cut. A change since then is noticed by its modification time.
    The time of access is that of the last use. What is removed while a process has it open stays readable to it.
    """

    def __init__(self, folder: Path | None = None, capacity_bytes: int | None = None) -> None:
        self.folder = home() / "cache" if folder is None else folder
        if capacity_bytes is None:
            capacity_gib = read_number_variable("SHOAL_CACHE_GIB", CAPACITY_GIB, "write the GiB that copies may take")
            capacity_bytes = int(capacity_gib * 2**30)
        self._capacity_bytes = capacity_bytes
        self._unchecked_bytes = self._capacity_bytes  # downloaded since the capacity was checked

    def fetch(self, store: Store, key: str, sha256: str) -> Path:
        """The file of an object with this hash; the store's own file where it is a folder.

        Raises FileNotFoundError, and StoreError when the store cannot be reached or the object has another hash.
        """
        if (own := store.locate(key)) is not None:
            return own
        path = self.folder / sha256[:2] / sha256

        def is_verified() -> bool:
            with suppress(FileNotFoundError), path.open("rb") as file:
                is_marked = os.fstat(file.fileno()).st_mtime == _get_verified_s()
                if is_marked or hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                    os.utime(file.fileno(), (time.time(), _get_verified_s()))
                    return True
            return False

        def download(draft: Path) -> None:
            if (found := store.download(key, draft)) != sha256:
                raise StoreError(f"{key} in {store.url} is damaged: its hash is {found}, not {sha256}")
            os.utime(draft, (time.time(), _get_verified_s()))

        return self._obtain(path, is_verified, download)

    def fetch_entry(self, store: Store, entry: Entry) -> Path:
        """The file of an object of a bucket with the tag and the size of its entry.

        Raises FileNotFoundError, KeyChanged when the object has another tag, and StoreError.
        """
        path = self.get_path(store.url, entry)

        def download(draft: Path) -> None:
            store.download(entry.key, draft, entry.tag)

        return self._obtain(path, lambda: is_present(path, entry.size_bytes), download)

    def get_folder(self, store_url: str) -> Path:
        """The folder of a bucket's objects."""
        return self.folder / store_url.replace("://", "/")

    def get_path(self, store_url: str, entry: Entry) -> Path:
        """Where `fetch_entry` writes the object: in the bucket's folders, with the hash of the tag before its name."""
        folder, _, name = entry.key.rpartition("/")
        tag = hashlib.sha256(f"{entry.tag or entry.modified_s} {entry.size_bytes}".encode()).hexdigest()[:16]
        return self.get_folder(store_url) / folder / f"{tag}-{name}"

    def _obtain(self, path: Path, is_valid: Callable[[], bool], download: Callable[[Path], None]) -> Path:
        """The file; `download` writes it, in one process of this host and thread of that."""
        if is_valid():
            return path
        make_folder(path.parent)
        locks = self.folder / ".locks"
        make_folder(locks)
        busy = StoreError(f"{path} is being downloaded by another process, for more than {LOCK_TIMEOUT_S:.0f} s")
        with file_lock(locks / hashlib.sha256(str(path).encode()).hexdigest()[:2], LOCK_TIMEOUT_S, busy):
            if is_valid():
                return path
            draft = path.with_name(f".{secrets.token_hex(8)}")
            try:
                download(draft)
                self._unchecked_bytes += draft.stat().st_size
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
        if self._unchecked_bytes > self._capacity_bytes // 100:  # many small files are not listed for each of them
            self._unchecked_bytes = 0
            self._remove_unused(path)
        return path

    def _remove_unused(self, newest: Path) -> None:
        """Remove files that were used longest ago, and not the newest one, until the rest fit."""
        folders = [each for each in self.folder.iterdir() if not each.name.startswith(".")]
        paths = [path for folder in folders for path in folder.rglob("*")]
        found = [(status.st_atime, status.st_size, path) for path in paths if (status := _stat(path))]
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._capacity_bytes:
                return
            if path != newest:
                path.unlink(missing_ok=True)
                total -= size


@cache
def _get_verified_s() -> float:
    """The modification time of a file with its hash, one of each start of the host: a write to it changes the time."""
    boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else f"{psutil.boot_time():.0f}"
    return float(int(hashlib.sha256(boot.encode()).hexdigest()[:7], 16))


def is_present(path: Path, size_bytes: int | None = None) -> bool:
    """Whether the file is there, with this size; it is noted as used now."""
    try:
        os.utime(path)
        return size_bytes is None or path.stat().st_size == size_bytes
    except FileNotFoundError:
        return False


def _stat(path: Path) -> os.stat_result | None:
    """None for a folder, and for a file that another process has removed meanwhile."""
    try:
        return None if path.is_dir() else path.stat()
    except FileNotFoundError:
        return None
