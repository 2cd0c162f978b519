"""Files that survive a power cut, complete or not at all.

Called by the registry and by checkpoints. Standard library only. All raise OSError.
"""

from __future__ import annotations

import os
from pathlib import Path


def write_synced(path: Path, payload: bytes) -> None:
    """Write the file, and return when it is on the disk. Readers may see an incomplete file meanwhile."""
    with path.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, payload: bytes) -> None:
    """Replace the file in one step: a reader sees the old or the new one, also after a power cut.

    On a full disk, the incomplete new file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
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
