"""Loading large libraries without looking for garbage in them. Called where a process loads torch for all its life."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def freeze_loaded_objects() -> Iterator[None]:
    """What there is at the end stays until the process ends, and Python's collector never looks through it.

    torch and its compiler make half a million objects; left to itself, the collector goes through them again and again
    while they are made, a quarter of the processor time of loading, and in 0.2 s each time it looks at everything.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
