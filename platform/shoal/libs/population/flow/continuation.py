"""Which spec a population's words ask for, and whether the run that they resume can go on with it.

Called by the flows of both kinds of population, of a Task's members and of learners, before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, Self, TypeVar

import shoal.runs
from shoal.config import last_override
from shoal.errors import ConfigError, SpecMismatch
from shoal.runs import Status


class EvolvedSpec(Protocol):
    """What both kinds of specs have."""

    resume: str
    rounds: int
    space: dict[str, Any]

    @classmethod
    def from_record(cls, text: str, overrides: Iterable[str] = ()) -> Self: ...

    def override(self, overrides: Iterable[str]) -> Self: ...


SpecT = TypeVar("SpecT", bound=EvolvedSpec)


def choose_spec(recipe: SpecT, overrides: Sequence[str]) -> SpecT:
    """The resumed run's spec, or the recipe, with `overrides`.

    Raises ConfigError for a fixed value of what the space has too: it would have no effect.
    """
    resumed = last_override(overrides, "resume")
    spec = type(recipe).from_record(shoal.runs.load(resumed).spec, overrides) if resumed else recipe.override(overrides)
    for path in spec.space:
        if fixed := last_override(overrides, path):
            raise ConfigError(path, fixed, "differs from member to member, by the space", f"add space.{path}=null")
    return spec


def require_continuation(spec: EvolvedSpec, unchanged: Sequence[str]) -> None:
    """Raise ConfigError for a run that has ended, SpecMismatch for one in which a field of `unchanged` differs."""
    before = shoal.runs.load(spec.resume)
    recorded = type(spec).from_record(before.spec)
    if before.status is Status.FINISHED and spec.rounds <= recorded.rounds:
        problem = f"has ended already, after {recorded.rounds} rounds"
        raise ConfigError("resume", before.id, problem, f"say when it ends now, as in rounds={2 * recorded.rounds}")
    for name in unchanged:
        if getattr(spec, name) != getattr(recorded, name):
            problem = f"the run has {getattr(recorded, name)!r}"
            raise SpecMismatch(name, getattr(spec, name), problem, "leave it out, or begin a new run")
