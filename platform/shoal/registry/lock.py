"""One writer of the registry at a time. Called by the registry alone; knows nothing of models."""

from __future__ import annotations

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
