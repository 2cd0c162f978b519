"""An evolution of members of different architectures: each architecture has an evolution of its own.

Weights of one architecture mean nothing to another, so members copy and are compared within theirs; architectures take
no rows from each other. Members are divided evenly, member k has combination k modulo their number: that each one is
trained by as many members makes them comparable. Called by `build`.
Legend: K members, k of one architecture.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shoal.errors import ConfigError
from shoal.libs.population.evolution.evolution import Decisions, Evolution, Restart, Standing
from shoal.libs.population.evolution.spec import EvolutionSpec
from shoal.search.space import Options, SearchSpace, Values

ARCHITECTURE = "args."  # the beginning of the paths that decide it: arguments of the Task

MakeEvolution = Callable[[SearchSpace, int, int], Evolution]  # of a space, a number of members, a seed


def list_architectures(space: SearchSpace) -> list[Values]:
    """Every combination of the options under `args.`, in the order of the space; [{}] where there are none.

    Raises ConfigError for an interval, which names no architecture.
    """
    options: dict[str, Sequence[object]] = {}
    for path, distribution in space.items():
        if not path.startswith(ARCHITECTURE):
            continue
        if not isinstance(distribution, Options):
            remedy = "name each of them, as in choice(4,6,8)"
            raise ConfigError(path, str(distribution), "is no list of architectures", remedy)
        options[path] = distribution.options
    return [dict(zip(options, each, strict=True)) for each in itertools.product(*options.values())]


class ArchitectureEvolution(Evolution):
    """Raises ConfigError where an architecture has fewer members than its evolution needs."""

    def __init__(
        self,
        spec: EvolutionSpec,
        space: SearchSpace,
        num_members: int,
        make: MakeEvolution,
        *,
        num_rounds: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(spec, space, num_members, num_rounds=num_rounds, seed=seed)
        self.architectures = list_architectures(space)
        count = len(self.architectures)
        self.groups = [list(range(index, num_members, count)) for index in range(count)]
        own = SearchSpace({path: each for path, each in space.items() if not path.startswith(ARCHITECTURE)})
        try:
            self._evolutions = [make(own, len(group), seed + index) for index, group in enumerate(self.groups)]
        except ConfigError as error:
            if error.field != "members":
                raise
            problem = f"gives {len(self.groups[-1])} to one of {count} architectures: {error.problem}"
            raise ConfigError("members", num_members, problem, error.remedy) from None

    def sample(self) -> list[Values]:
        drawn = [each.sample() for each in self._evolutions]
        return [
            self._complete(member, drawn[member % len(drawn)][member // len(drawn)])
            for member in range(self.num_members)
        ]

    def _decide(self, standing: Standing) -> Decisions:
        found = [self._decide_group(index, standing) for index in range(len(self.groups))]
        return Decisions(
            copies=tuple(pair for each in found for pair in each.copies),
            fresh=_collect(each.fresh for each in found),
            restart=_merge_restarts([each.restart for each in found if each.restart is not None]),
            changes={member: values for each in found for member, values in each.changes.items()},
            retired=_collect(each.retired for each in found),
            stopped=_collect(each.stopped for each in found),
        )

    def _decide_group(self, index: int, standing: Standing) -> Decisions:
        """A group in which no member has a score begins again; it does not end the others' run."""
        group, evolution = self.groups[index], self._evolutions[index]
        if not any(member in standing.ranked for member in group):
            failed = tuple(member for member in group if member in standing.failed)
            if standing.is_last:
                return Decisions(retired=failed, stopped=failed)
            evolution.begin_again(standing.round_number)
            changes = {member: self._complete(member, evolution.space.sample(standing.rng)) for member in failed}
            return Decisions(fresh=failed, changes=changes, retired=failed)
        values = [standing.values[member] for member in group]
        found = evolution.next(standing.round_number, standing.scores[np.array(group)], values)
        restart = found.restart
        return Decisions(
            copies=tuple((group[loser], group[winner]) for loser, winner in found.copies),
            fresh=tuple(group[each] for each in found.fresh),
            restart=restart and replace(
                restart, members=tuple(group[each] for each in restart.members), best=group[restart.best]
            ),
            changes={group[each]: self._complete(group[each], changed) for each, changed in found.changes.items()},
            retired=tuple(group[each] for each in found.retired),
            stopped=tuple(group[each] for each in found.stopped),
        )  # fmt: skip

    def _complete(self, member: int, values: Mapping[str, Any]) -> Values:
        """With the member's architecture, in the order of the space."""
        whole = {**values, **self.architectures[member % len(self.architectures)]}
        return {path: whole[path] for path in self.space}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "evolutions": [each.state_dict() for each in self._evolutions]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for each, saved in zip(self._evolutions, state["evolutions"], strict=True):
            each.load_state_dict(saved)


def _collect(parts: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(sorted(itertools.chain.from_iterable(parts)))


def _merge_restarts(restarts: list[Restart]) -> Restart | None:
    """Of several architectures that restart after the same round, as one; `best` and `rounds` are the first's."""
    if not restarts:
        return None
    return replace(restarts[0], members=_collect(each.members for each in restarts))
