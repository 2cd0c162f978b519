"""The fork server's imported modules, as a worker that has imported nothing yet must see them.

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
    """Modules in memory, hidden until they are imported.

    A package's modules reappear at its first import if the import would find the same files now; otherwise the
    package is imported anew. `begin` repeats a package's work at import (read its environment, draw a seed).
    """

    def __init__(self, names: Iterable[str], begin: Mapping[str, Callable[[ModuleType], None]]) -> None:
        """Hide these modules. `begin` maps a package's name to a function of its module."""
        self._packages: dict[str, dict[str, ModuleType]] = defaultdict(dict)
        self._found: dict[str, dict[str, ModuleType]] = {}
        self._initializers = begin
        for name in names:
            self._packages[name.partition(".")[0]][name] = sys.modules.pop(name)
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        modules = self._packages.pop(name, None)  # a package is imported before its submodules
        if modules is None or not _is_same_module(modules[name].__spec__, find_spec(name)):
            return None
        self._found[name] = modules
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = self._found[spec.name][spec.name]
        spec.loader_state = module.__spec__  # importlib replaces it by `spec`
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        name, module.__spec__ = module.__name__, module.__spec__.loader_state
        sys.modules.update(self._found.pop(name))
        if name in self._initializers:
            self._initializers[name](module)


def _is_same_module(ours: ModuleSpec | None, found: ModuleSpec | None) -> bool:
    """Whether both mean the same files. A namespace package may have gained folders."""
    if ours is None or found is None or ours.origin != found.origin:
        return False
    return set(ours.submodule_search_locations or ()) <= set(found.submodule_search_locations or ())
