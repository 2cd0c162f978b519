"""Resumable state on disk: written whole or not at all, checked when it is read, the last good one found.

`Checkpointer` is for many ranks: shards, in the background, loadable into another layout. `save` and `load_latest` are
for one process that has all of its state in hand. The former is imported when it is first named: torch's distributed
checkpoints take a second of every process that loads them.
"""

from typing import TYPE_CHECKING, Any

from shoal.checkpoint.files import Loaded, load_latest, save

if TYPE_CHECKING:
    from shoal.checkpoint.checkpointer import Checkpointer, Extras, Found

__all__ = ["Checkpointer", "Extras", "Found", "Loaded", "load_latest", "save"]


def __getattr__(name: str) -> Any:
    if name not in ("Checkpointer", "Extras", "Found"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shoal.checkpoint import checkpointer

    return getattr(checkpointer, name)
