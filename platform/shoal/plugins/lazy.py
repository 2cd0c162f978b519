"""Names of a module that are imported at their first use, listed once.

    if TYPE_CHECKING:
        from shoal.train.task import Task

    __getattr__ = load_on_demand(__name__)

The imports under `if TYPE_CHECKING:` are the list: a type checker reads them as ever, and this module reads them from
the source when a name is asked for.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from shoal.plugins.library import collect_extensions


@cache
def list_exports(module: str) -> dict[str, str]:
    """The module that each name comes from."""
    spec = sys.modules[module].__spec__
    source = spec.loader.get_source(module)  # type: ignore[union-attr]
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def load_on_demand(module: str, group: str = "") -> Callable[[str], Any]:
    """Make the `__getattr__` of the module, which lists its names for `dir`, `help` and `import *`.

    group: of the extensions by which libraries add names to it
    """

    def list_names() -> list[str]:
        return sorted({*list_exports(module), *(collect_extensions(group) if group else ())})

    def load(name: str) -> Any:
        if name == "__all__":
            return list_names()
        home = None if name.startswith("__") else list_exports(module).get(name)
        if home is None and group and not name.startswith("_"):
            home, _, _ = collect_extensions(group).get(name, "").partition(":")
        if not home:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        package = importlib.import_module(home)
        is_submodule = hasattr(package, "__path__") and not hasattr(package, name)
        return importlib.import_module(f"{home}.{name}") if is_submodule else getattr(package, name)

    vars(sys.modules[module])["__dir__"] = list_names
    return load
