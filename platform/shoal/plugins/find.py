"""Finds what a word of a spec names: something of ours, of a library or package, or of the user's own file.

    algorithm=ppo                       of the platform
    algorithm=dqn                       of a library
    algorithm=grpo                      of a package with an entry point `grpo` in the group `shoal.algorithms`
    algorithm=my_package.grpo:Config    of a module that can be imported
    algorithm=grpo.py:Config            of a file

Raises ValueError, so that a spec names the field.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shoal.errors import ConfigError, suggest
from shoal.plugins.library import collect_extensions, find_libraries

_log = logging.getLogger(__name__)


def find_extension(name: str, group: str, own: Mapping[str, str] = MappingProxyType({})) -> Any:
    """The object of that name.

    group: of entry points, such as "shoal.algorithms"
    own:   the `module:name` of each name of the platform

    Raises ValueError when nothing has the name, or what has it cannot be imported.
    """
    if ":" in name:
        return load_reference(name)
    if name in own:
        return load_reference(own[name])
    others = collect_extensions(group)
    if name in others:
        return load_reference(others[name])
    find_libraries()  # the word may be of one that cannot be imported: that is what to say
    known = ", ".join([*own, *others]) or "the words of installed libraries"
    near = suggest(name, [*own, *others])
    raise ValueError(f"{name!r} is none of {known}{near and f': {near}'}; your own is module:name or file.py:name")


def find_optional(name: str, group: str) -> Any | None:
    """What a library adds under this name; None without it. Raises ValueError where it cannot be loaded."""
    reference = collect_extensions(group).get(name)
    return None if reference is None else load_reference(reference)


def find_in_library(name: str, group: str, library: str, field: str, value: str = "") -> Any:
    """What a library of Shoal adds under this name. Raises ConfigError for `field` without that library."""
    try:
        return find_extension(name, group)
    except ValueError as error:
        raise ConfigError(field, value, str(error), f"install the library {library} of Shoal") from None


def load_sound_extensions(group: str, use: Callable[[Any], Any] = lambda found: found) -> dict[str, Any]:
    """Load what each word of a group names, and `use` it; leave out, with a warning, a word where that fails: a caller
    that asks for all needs none of another package."""
    loaded = {}
    for name, reference in collect_extensions(group).items():
        try:
            loaded[name] = use(load_reference(reference))
        except Exception as error:  # noqa: BLE001 - whatever another package raises
            _log.warning("%s of %s is left out: %s", name, group, error)
    return loaded


def load_reference(reference: str) -> Any:
    """What `module:name` or `file.py:name` names. Raises ValueError.

    A file is imported as a module of its name, from its folder: workers that get `sys.path` import it too. A module is
    also looked for in the current folder.
    """
    module, _, name = reference.partition(":")
    path: Path | None = None
    if module.endswith(".py"):
        path = Path(module)
        if not path.is_file():
            raise ValueError(f"there is no file {module} in {Path.cwd()}")
        if (folder := str(path.resolve().parent)) not in sys.path:
            sys.path.insert(0, folder)
        module = path.stem
    elif (folder := os.getcwd()) not in sys.path:  # a program such as `shoal` has its own folder there
        sys.path.append(folder)
    try:
        imported = importlib.import_module(module)
        if path is not None and Path(imported.__file__ or "").resolve() != path.resolve():
            raise ValueError(f"{reference} is hidden by the module {module!r} of {imported.__file__}: rename the file")
        return getattr(imported, name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{reference} cannot be loaded ({error})") from error
