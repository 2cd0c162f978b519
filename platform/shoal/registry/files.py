"""How the registry touches the disk: whole or not at all, and one writer at a time.

Called by the registry alone; knows nothing of models.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shoal.errors import RegistryError
from shoal.home import exclusive

LOCK_TIMEOUT_S = 60.0


@contextmanager
def locked(folder: Path, name: str = ".lock") -> Iterator[None]:
    """Keep every other holder of this lock, in this process or another, out; a killed holder lets go by dying.

    Raises RegistryError when it stays locked for LOCK_TIMEOUT_S.
    """
    with ExitStack() as held:
        try:
            held.enter_context(exclusive(folder / name, LOCK_TIMEOUT_S))
        except TimeoutError:
            raise RegistryError(f"{folder} is being written by another process; try again") from None
        yield


def write_synced(path: Path, payload: bytes) -> None:
    """Write the file, and return when it is on the disk."""
    with path.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, payload: bytes) -> None:
    """Replace the file in one step: a reader sees the old or the new one, also after a power cut."""
    incoming = path.with_name(f".incoming-{path.name}")
    write_synced(incoming, payload)
    incoming.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the folder's list of names durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
