"""Resumable state on disk: written completely or not at all, verified on reading; finds the last good checkpoint.

`Checkpointer` is for many ranks: shards, in the background, loadable into another layout. `save` and `load_latest` are
for one process with all of its state. All are imported at their first use: torch takes seconds to load, and its
distributed checkpoints another. A reader of names and manifests needs neither.
"""

from typing import TYPE_CHECKING, Any

from shoal.errors import needs_extra

with needs_extra("cluster"):
    import pydantic  # noqa: F401 - of the extra: without it the import of this package names it

if TYPE_CHECKING:
    from shoal.checkpoint.checkpointer import Checkpointer, Extras, Found
    from shoal.checkpoint.files import Loaded, load_latest, save

__all__ = ["Checkpointer", "Extras", "Found", "Loaded", "load_latest", "save"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs_extra("cluster"):
        from shoal.checkpoint import files
    if hasattr(files, name):
        return getattr(files, name)
    from shoal.checkpoint import checkpointer

    return getattr(checkpointer, name)
