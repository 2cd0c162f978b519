"""References to registered models, `name@3` or `name@champion`, and the version of each alias, now and before: an
append-only list of moves for each alias. Also the used version numbers.

Pure values: the registry reads and writes aliases as `aliases.json`. Never touches a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from shoal.config import Spec
from shoal.errors import ConfigError

FORMAT = 1  # of aliases.json


class AliasMove(Spec):
    """A move of an alias to `version`: to a new one (promote) or back to the previous one (rollback).

    time: seconds since the epoch
    """

    version: int
    time: float
    kind: Literal["promote", "rollback"]


class Aliases(Spec):
    """The moves of every alias of one model.

    newest:  the highest version number used
    removed: versions that are removed, or are just being removed

    Retains the fields of a later Shoal, which lie in `model_extra`.
    """

    model_config = ConfigDict(extra="allow")

    format: int = FORMAT
    moves: dict[str, list[AliasMove]] = Field(default_factory=dict)
    newest: int = 0
    removed: list[int] = Field(default_factory=list)

    @model_validator(mode="after")
    def _rollbacks_have_somewhere_to_go(self) -> Aliases:
        """Check a file, which may have been edited by hand."""
        for alias, moves in self.moves.items():
            depth = 0
            for move in moves:
                depth += 1 if move.kind == "promote" else -1
                if depth < 1:
                    raise ValueError(f"{alias} is rolled back, with nothing before to go back to")
        return self

    def list_promoted(self, alias: str) -> list[int]:
        """The versions promoted and not rolled back, oldest first; the alias names the last one.

        A version that was rolled back is withdrawn, until it is promoted again: an earlier promotion of it counts no
        more.
        """
        stack: list[int] = []
        for move in self.moves.get(alias, []):
            if move.kind == "rollback":
                withdrawn = stack.pop()
                stack = [version for version in stack if version != withdrawn]
                while move.version in stack and stack[-1] != move.version:
                    stack.pop()
            if not stack or stack[-1] != move.version:
                stack.append(move.version)
        return stack

    def target(self, alias: str) -> int | None:
        """The alias's version; None for an unknown alias."""
        stack = self.list_promoted(alias)
        return stack[-1] if stack else None

    def list_names(self, version: int) -> tuple[str, ...]:
        """The aliases of `version`, sorted."""
        return tuple(sorted(alias for alias in self.moves if self.target(alias) == version))

    def has_named(self, version: int) -> bool:
        """Whether an alias has ever named this version."""
        return any(move.version == version for moves in self.moves.values() for move in moves)

    def with_version(self, version: int) -> Aliases:
        """A copy with `version` registered."""
        return self.model_copy(update={"newest": max(self.newest, version)})

    def with_removal(self, versions: Iterable[int], *, keep_moves: bool) -> Aliases:
        """A copy without these versions; without `keep_moves`, also without any alias."""
        removed = sorted({*self.removed, *versions})
        return self.model_copy(update={"removed": removed, "moves": self.moves if keep_moves else {}})

    def with_promotion(self, version: int, aliases: Iterable[str], time: float) -> Aliases:
        """A copy in which `aliases` name `version`, with a move for each that did not; without any move, this
        object."""
        aliased = self
        for alias in aliases:
            if aliased.target(alias) != version:
                aliased = aliased.with_move(alias, AliasMove(version=version, time=time, kind="promote"))
        return aliased

    def with_move(self, alias: str, move: AliasMove) -> Aliases:
        """A copy with one more move."""
        return self.model_copy(update={"moves": {**self.moves, alias: [*self.moves.get(alias, []), move]}})


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
ALIAS = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")


def split_ref(ref: str) -> tuple[str, str]:
    """Split `name@3` or `name@champion` into name and version or alias; the second is empty for `name` and
    `name@latest`.

    Raises ConfigError for an invalid reference.
    """
    name, separator, word = ref.partition("@")
    if ":" in name:
        remedy = "here it is `shoal chat ADAPTER`, beside its base `shoal chat NAME:ADAPTER --endpoint ENDPOINT`"
        raise ConfigError("model", ref, "is an adapter beside its base", remedy)
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
