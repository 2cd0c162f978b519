"""Durable files: private to their owner; complete or not at all, also after a power cut; of a format that is read here.

Called by all that writes below $SHOAL_HOME. Standard library only. What writes raises OSError.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


def describe_newer_format(path: Path | str, found: object, known: int) -> str:
    """Why a file with a higher format's number than this release reads is rejected, and the remedy."""
    remedy = "upgrade Shoal, or set SHOAL_HOME to another folder"
    return f"{path} was written by a newer Shoal (format {found}; this one reads {known}): {remedy}"


def is_newer_format(found: object, known: int) -> bool:
    """Whether a file's number of its format is beyond those that this release reads."""
    return isinstance(found, int) and found > known


def require_known_format(path: Path | str, document: object, known: int, error: type[Exception]) -> None:
    """Raise `error` where a file's content is of a higher format than this release reads."""
    if isinstance(document, dict) and is_newer_format(number := document.get("format"), known):
        raise error(describe_newer_format(path, number, known))


def log_unknown_fields(path: Path | str, names: Iterable[str]) -> None:
    """Log, once in a process, the fields of a file that this release does not have."""
    if found := ", ".join(names):
        _log_once(f"{path} has fields that this release of Shoal does not have; they have no effect: {found}")


@lru_cache(maxsize=256)
def _log_once(warning: str) -> None:
    _log.warning("%s", warning)


def make_folder(path: Path) -> None:
    """Create a folder, and missing parents, that only its owner may enter. One that exists keeps its permissions."""
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def create_private(path: Path) -> Path:
    """Create an empty file that only its owner may read, unless there is one; returns the path, to write to it."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o600))
    return path


def connect_private(path: Path, **options: Any) -> sqlite3.Connection:
    """A connection to an SQLite file; one that is new is for its owner alone, and so are SQLite's files next to it.

    Never opens the file besides: closing it would release the locks of this process's other connections (POSIX), and
    other processes would damage the file.
    """
    is_new = not path.exists()
    connection: sqlite3.Connection = sqlite3.connect(path, **options)
    if is_new:
        path.chmod(0o600)
    return connection


def hash_file(path: Path) -> str:
    """The SHA-256 of a file, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_synced(path: Path, payload: bytes) -> None:
    """Write the file, and return when it is on the disk. Readers may see an incomplete file meanwhile."""
    with create_private(path).open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, payload: bytes) -> None:
    """Replace the file in one step: a reader sees the old or the new one, also after a power cut.

    On a full disk, the incomplete new file is removed.
    """
    make_folder(path.parent)
    draft = path.with_name(f".{path.name}.draft")
    try:
        write_synced(draft, payload)
        move_synced(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def move_synced(draft: Path, path: Path) -> None:
    """Move a file that is already on the disk to this path, which needs no space."""
    draft.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def draft_folder(into: Path) -> Iterator[Path]:
    """A folder next to `into`, which takes its place when the block ends; after an error it is removed."""
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{into.name}.", dir=into.parent) as parent:
        draft, former = Path(parent, "draft"), Path(parent, "former")
        draft.mkdir()
        yield draft
        if into.exists():
            into.rename(former)
        try:
            draft.rename(into)
        except OSError:
            if former.exists():
                former.rename(into)
            raise
