"""A folder of checkpoints: their names, drafts that appear whole, checksums, and which of them are kept.

    FOLDER/step-000000123/        a checkpoint; it was renamed to this name when all of it was on the disk
    FOLDER/.draft-000000124-ab    one being written, or what a process that died has left

Called by both kinds of checkpoint, `files` and `checkpointer`; knows nothing of what is in one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shoal.durable import sync_folder

BLOCK_BYTES = 4 << 20


class FileSum(NamedTuple):
    """What a manifest knows of a file."""

    size_bytes: int
    sha256: str


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of that step lies, or would."""
    return folder / f"step-{step:09d}"


def draft_of(folder: Path, step: int, token: str) -> Path:
    """Where it is written before it appears."""
    return folder / f".draft-{step:09d}-{token}"


def newest_first(folder: Path) -> list[Path]:
    """All checkpoints, damaged ones too."""
    return sorted(folder.glob("step-*"), reverse=True)


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> FileSum:
    """Write a new file and have the disk confirm it. Raises OSError."""
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
            size_bytes += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileSum(size_bytes, digest.hexdigest())


def damage(path: Path, expected: FileSum) -> str:
    """What is wrong with a file; empty if nothing is."""
    digest, size_bytes = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                size_bytes += len(block)
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    if size_bytes != expected.size_bytes:
        return f"{path.name} has {size_bytes} bytes instead of {expected.size_bytes}"
    return "" if digest.hexdigest() == expected.sha256 else f"{path.name} does not match its checksum"


def publish(draft: Path, target: Path) -> None:
    """Let a finished draft appear; a checkpoint of the same step makes place. Raises OSError."""
    sync_folder(draft)
    aside = target.with_name(f".draft-{target.name}-replaced")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    draft.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def tidy(folder: Path, newest: Path, keep: int, pinned: Path | None = None) -> None:
    """Keep `newest` and those before it, `keep` in all, and `pinned`. Later steps are of a timeline that was given up:
    they were damaged, or the run would have gone on from them. Drafts are of processes that died."""
    found = newest_first(folder)
    later = [path for path in found if path.name > newest.name]
    earlier = [path for path in found if path.name < newest.name]
    old = [path for path in earlier[keep - 1 :] if path != pinned]
    for path in [*later, *old, *folder.glob(".draft-*")]:
        shutil.rmtree(path, ignore_errors=True)
