"""Resumable state on disk: written whole or not at all, checked when it is read, the last good one found.

`Checkpointer` is for many ranks: shards, in the background, loadable into another layout. `save` and `load_latest` are
for one process that has all of its state in hand.
"""

from shoal.checkpoint.checkpointer import Checkpointer, Extras, Found
from shoal.checkpoint.files import Loaded, load_latest, save
from shoal.checkpoint.folder import write_synced

__all__ = ["Checkpointer", "Extras", "Found", "Loaded", "load_latest", "save", "write_synced"]
