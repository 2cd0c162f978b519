"""Resumable state on disk: written completely or not at all, verified on reading; finds the last good checkpoint.

`Checkpointer` is for many ranks: shards, in the background, loadable into another layout. `save` and `load_latest` are
for one process with all of its state. `Checkpointer` is imported at its first use: torch's distributed checkpoints take
a second to load.
"""

from typing import TYPE_CHECKING, Any

from shoal.errors import needs_extra

with needs_extra("cluster"):
    from shoal.checkpoint.files import Loaded, load_latest, save

if TYPE_CHECKING:
    from shoal.checkpoint.checkpointer import Checkpointer, Extras, Found

__all__ = ["Checkpointer", "Extras", "Found", "Loaded", "load_latest", "save"]


def __getattr__(name: str) -> Any:
    if name not in ("Checkpointer", "Extras", "Found"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shoal.checkpoint import checkpointer

    return getattr(checkpointer, name)
