"""A library: a package that joins the command line of `shoal`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from shoal.errors import ConfigError

LIBRARIES = "shoal.libraries"


@dataclass(frozen=True)
class Library:
    """What is built on Shoal, and joins its command line. Cheap to import: it names modules, and imports none.

    verbs:      of the program `shoal`, by name: the `module:command`, a command of click, and a line of help; a verb
                within `shoal models` is named as "models push"
    displays:   by the kind of a run: the module that draws it live: its `make_view` returns a `RunView`
                (see `shoal.cli.display.run_view`)
    extensions: by a group of entry points, such as "shoal.algorithms": the `module:name` of each word that specs name;
                in the group "shoal.panels" by the kind of a run: its `RunPanels`
    names:      attributes of the package `shoal`: a module, or `module:name`
    needs:      other libraries that it imports; without one of them it is not there
    heading:    of its verbs in `shoal --help`: "begin", "train", "play", "serve", "look" or "operate"
    """

    name: str
    verbs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    displays: Mapping[str, str] = field(default_factory=dict)
    extensions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    heading: str = "operate"


@cache
def find_libraries() -> tuple[Library, ...]:
    """Those of `shoal.libs`, then those of other packages. Raises ConfigError for one that cannot be imported."""
    return _select_complete([_load(reference) for reference in _list_references()])


@cache
def find_sound_libraries() -> tuple[Library, ...]:
    """Those that can be imported: a run does not fail because of another package's broken library."""
    libraries = []
    for reference in _list_references():
        with suppress(ConfigError):
            libraries.append(_load(reference))
    return _select_complete(libraries)


def _select_complete(libraries: Sequence[Library]) -> tuple[Library, ...]:
    names = {each.name for each in libraries}
    return tuple(each for each in libraries if names.issuperset(each.needs))


def collect_extensions(group: str) -> dict[str, str]:
    """The `module:name` of each word of a group that a sound library or an installed package adds. Raises ConfigError
    for a package whose word is another's."""
    libraries = find_sound_libraries()
    found = {name: reference for each in libraries for name, reference in each.extensions.get(group, {}).items()}
    for each in entry_points(group=group):
        if each.name in found:
            owners = f"{each.dist.name if each.dist else each.value}, and of {found[each.name].partition(':')[0]}"
            raise ConfigError(group, each.name, f"is a word of {owners}", "uninstall one of the packages")
        found[each.name] = each.value
    return found


_OWN = Path(__file__).parents[1] / "libs"


def _list_references() -> list[str]:
    """The `module:name` of each, by what the heads of our own say: to import one that is none may take long."""
    heads = {each.name: (_OWN / each.name / "__init__.py").read_text() for each in pkgutil.iter_modules([str(_OWN)])}
    own = [f"shoal.libs.{name}:LIBRARY" for name, head in heads.items() if "\nLIBRARY = " in head]
    return [*own, *(each.value for each in entry_points(group=LIBRARIES))]


def _load(reference: str) -> Library:
    module, _, name = reference.partition(":")
    try:
        library = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(LIBRARIES, reference, f"cannot be imported ({error})", "mend or uninstall it") from error
    if not isinstance(library, Library):
        raise ConfigError(LIBRARIES, reference, "is no shoal.extend.Library", "mend or uninstall it")
    return library
