"""What the fork server has imported, as it looks to a worker that has imported nothing yet.

Used by `fork_server`, in each process that it forks.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class PreloadedModuleFinder(MetaPathFinder, Loader):
    """Modules that are in memory, hidden until they are imported.

    They come back a package at a time, with its first import, if that would find the same files now; else it is
    imported anew. What a package does as it begins (read its environment, draw a seed) is done again by `begin`.
    """

    def __init__(self, names: Iterable[str], begin: Mapping[str, Callable[[ModuleType], None]]) -> None:
        """Hide the modules of these names. `begin` has functions of a package's module, by its name."""
        self._packages: dict[str, dict[str, ModuleType]] = defaultdict(dict)
        self._found: dict[str, dict[str, ModuleType]] = {}
        self._initializers = begin
        for name in names:
            self._packages[name.partition(".")[0]][name] = sys.modules.pop(name)
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        modules = self._packages.pop(name, None)  # of what lies in a package its package is imported first
        if modules is None or not _is_same_module(modules[name].__spec__, find_spec(name)):
            return None
        self._found[name] = modules
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = self._found[spec.name][spec.name]
        spec.loader_state = module.__spec__  # importlib puts `spec` in its place
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        name, module.__spec__ = module.__name__, module.__spec__.loader_state
        sys.modules.update(self._found.pop(name))
        if name in self._initializers:
            self._initializers[name](module)


def _is_same_module(ours: ModuleSpec | None, found: ModuleSpec | None) -> bool:
    """Whether both mean the same files; a package without a file of its own may have more folders than it had."""
    if ours is None or found is None or ours.origin != found.origin:
        return False
    return set(ours.submodule_search_locations or ()) <= set(found.submodule_search_locations or ())
