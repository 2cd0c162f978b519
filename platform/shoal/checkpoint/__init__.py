"""Resumable state on disk: written completely or not at all, verified on reading; finds the last good checkpoint.

`Checkpointer` is for many ranks: shards, in the background, loadable into another layout. `save` and `load_latest` are
for one process with all of its state. All are imported at their first use: torch takes seconds to load, and its
distributed checkpoints another. A reader of names and manifests needs neither.
"""

from typing import TYPE_CHECKING

from shoal.errors import needs_extra
from shoal.plugins.lazy import load_on_demand

with needs_extra("cluster"):
    import pydantic  # of the extra: without it the import of this package names it

if TYPE_CHECKING:
    from shoal.checkpoint.checkpointer import Checkpointer, Extras, Found
    from shoal.checkpoint.files import Loaded, load_latest, save

__getattr__ = load_on_demand(__name__)
