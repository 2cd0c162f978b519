"""References to registered models, `name@3` or `name@champion`, and the rules for names and aliases. Pure."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from shoal.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
ALIAS = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")


def split_ref(ref: str) -> tuple[str, str]:
    """Split `name@3` or `name@champion` into name and version or alias; the second is empty for `name` and
    `name@latest`.

    Raises ConfigError for an invalid reference.
    """
    name, separator, word = ref.partition("@")
    require_name("model", name)
    if separator and not ALIAS.fullmatch(word):
        raise ConfigError("model", ref, "is not a model reference", "write name@3, name@champion, or name")
    return name, "" if word == "latest" else word


def require_name(field: str, name: str) -> None:
    """Check a model's name early. Raises ConfigError for an invalid one."""
    if not NAME.fullmatch(name):
        remedy = "use A-Z, a-z, 0-9, '.', '_' and '-', 128 at most, and begin with a letter or a digit"
        raise ConfigError(field, name, "is not a name", remedy)


def is_twin(name: str, other: str) -> bool:
    return name.lower() == other.lower()


def require_alias(alias: str, field: str = "alias") -> None:
    """Check an alias early. Raises ConfigError for an invalid one."""
    if not ALIAS.fullmatch(alias):
        remedy = "use a-z, 0-9, '.', '_' and '-', 128 at most, and begin with a-z or 0-9"
        raise ConfigError(field, alias, "is not a name", remedy)
    if alias.isdigit() or alias == "latest":
        raise ConfigError(
            field, alias, "is already a reference to a version", "choose a name, such as champion or candidate"
        )


def require_aliases(aliases: tuple[str, ...]) -> tuple[str, ...]:
    for alias in aliases:
        require_alias(alias)
    return aliases


# A field of a spec: an invalid alias is rejected when the spec is read, not after the training.
AliasNames = Annotated[tuple[str, ...], AfterValidator(require_aliases)]
