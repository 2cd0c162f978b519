"""Load large libraries without garbage collection. Called where a process loads torch for its lifetime."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def freeze_loaded_objects() -> Iterator[None]:
    """Freeze all objects at the end of the context: Python's collector skips them until the process ends.

    torch and its compiler create half a million objects. The collector would traverse them again and again during the
    import, a quarter of its CPU time, and take 0.2 s for each later full collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
