"""A store that is a folder of this host, or of a file system that hosts share. Standard library only.

Readers never see drafts, whose names begin with a dot. Replacing holds a lock, which a killed holder releases by dying.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from shoal.atomic_file import hash_file, make_folder, move_synced, sync_folder, write_synced
from shoal.errors import StoreError
from shoal.home import file_lock
from shoal.store.store import Entry, KeyChanged, KeyTaken, Store, Tagged

LOCK_TIMEOUT_S = 60.0
_LOCK = ".lock"
_DRAFT = re.compile(r"\..+-[0-9a-f]{16}")


class FolderStore(Store):
    """Objects as files below `root`, readable by their owner alone. Raises OSError when it cannot be created."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)
        make_folder(root)

    def read_tagged(self, key: str) -> Tagged:
        payload = (self.root / key).read_bytes()
        return Tagged(payload, hashlib.sha256(payload).hexdigest())

    def read(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def download(self, key: str, path: Path, tag: str = "") -> str:
        if tag and self.read_tagged(key).tag != tag:
            raise KeyChanged(f"{self.root / key} was changed")
        shutil.copyfile(self.root / key, path)
        return hash_file(path)

    def open_reader(self, key: str) -> BinaryIO:
        return (self.root / key).open("rb")

    def write(self, key: str, content: bytes | Path) -> None:
        self._put(key, content)

    def copy(self, source: str, target: str) -> None:
        self._put(target, self.root / source)

    def create(self, key: str, payload: bytes) -> None:
        path = self.root / key
        with self._draft(key, payload) as draft:
            try:
                os.link(draft, path)
            except FileExistsError:
                raise KeyTaken(f"{path} exists") from None
            sync_folder(path.parent)

    def replace(self, key: str, payload: bytes, tag: str) -> None:
        path = self.root / key
        busy = StoreError(f"{path.parent} is being written by another process; try again")
        try:
            with file_lock(path.parent / _LOCK, LOCK_TIMEOUT_S, busy):
                if self.read_tagged(key).tag != tag:
                    raise KeyChanged(f"{path} was changed")
                self._put(key, payload)
        except FileNotFoundError:
            raise KeyChanged(f"{path} was removed") from None

    def find(self, key: str) -> Entry:
        path = self.root / key
        if not path.is_file():
            raise FileNotFoundError(f"{path} is no file")
        status = path.stat()
        return Entry(key, status.st_size, status.st_mtime)

    def list_entries(self, folder: str = "") -> list[Entry]:
        result = ((path.relative_to(self.root).as_posix(), status) for path, status in _walk(self.root / folder))
        return sorted(Entry(key, status.st_size, status.st_mtime) for key, status in result)

    def list_folders(self, folder: str = "") -> list[str]:
        try:
            with os.scandir(self.root / folder) as entries:
                return sorted(each.name for each in entries if each.is_dir() and not each.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self.root / key
            path.unlink(missing_ok=True)
            for parent in path.parents:
                try:
                    if parent == self.root or set(os.listdir(parent)) - {_LOCK}:  # a folder's lock is no content
                        break
                    (parent / _LOCK).unlink(missing_ok=True)
                    parent.rmdir()
                except OSError:  # another has written to it, or removed it
                    break

    def open_folder(self, folder: str) -> FolderStore:
        return FolderStore(self.root / folder)

    def locate(self, key: str) -> Path:
        return self.root / key

    def remove_drafts(self, older_than_s: float) -> None:
        newest_s = time.time() - older_than_s
        for path in self.root.rglob(".*"):
            with suppress(FileNotFoundError):
                if _DRAFT.fullmatch(path.name) and path.stat().st_mtime < newest_s:
                    path.unlink()

    def _put(self, key: str, content: bytes | Path) -> None:
        with self._draft(key, content) as draft:
            move_synced(draft, self.root / key)

    @contextmanager
    def _draft(self, key: str, content: bytes | Path) -> Iterator[Path]:
        """The content in a file beside its place, on the disk. It is removed at the end, if it is still there."""
        path = self.root / key
        draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
        for _ in range(3):  # `delete` removes a folder that is empty at the moment
            make_folder(path.parent)
            try:
                if isinstance(content, bytes):
                    write_synced(draft, content)
                else:
                    with content.open("rb") as source, draft.open("xb") as target:
                        draft.chmod(0o600)
                        shutil.copyfileobj(source, target, 1 << 22)
                        target.flush()
                        os.fsync(target.fileno())
                break
            except FileNotFoundError:
                if path.parent.exists():
                    raise
            except OSError:
                draft.unlink(missing_ok=True)
                raise
        try:
            yield draft
        finally:
            draft.unlink(missing_ok=True)


def _walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:  # also one that is removed now
        for each in entries:
            if each.name.startswith("."):
                continue
            if each.is_dir():
                yield from _walk(Path(each.path))
            else:
                with suppress(FileNotFoundError):
                    yield Path(each.path), each.stat()
