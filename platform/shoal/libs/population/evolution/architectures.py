"""The evolution of a spec; for members of different architectures one for each architecture.

Weights of one architecture mean nothing to another, so members copy and are compared within theirs; architectures take
no rows from each other. Members are divided evenly, member k has combination k modulo their number: that each one is
trained by as many members makes them comparable. Called by flows.
Legend: K members, k of one architecture.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.errors import ConfigError
from shoal.libs.population.evolution.evolution import Decisions, Evolution, RandomSearch, Standing
from shoal.libs.population.evolution.halving import Halving
from shoal.libs.population.evolution.pbt import PBT
from shoal.libs.population.evolution.spec import EvolutionSpec
from shoal.search.space import Options, SearchSpace, Values

ARCHITECTURE = "args."  # the beginning of the paths that decide it: arguments of the Task
EVOLUTIONS: dict[str, type[Evolution]] = {
    "pbt": PBT,
    "halving": Halving,
    "random_search": RandomSearch,
}


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

    def _set_up(self) -> None:
        self.architectures = list_architectures(self.space)
        count = len(self.architectures)
        self.groups = [list(range(index, self.num_members, count)) for index in range(count)]
        own = SearchSpace({path: each for path, each in self.space.items() if not path.startswith(ARCHITECTURE)})
        make = EVOLUTIONS[self.spec.name]
        try:
            self._evolutions = [
                make(self.spec, own, len(group), num_rounds=self.num_rounds, seed=self.seed + index)
                for index, group in enumerate(self.groups)
            ]
        except ConfigError as error:
            if error.field != "members":
                raise
            problem = f"gives {len(self.groups[-1])} to one of {count} architectures: {error.problem}"
            raise ConfigError("members", self.num_members, problem, error.remedy) from None

    def sample(self) -> list[Values]:
        drawn = [each.sample() for each in self._evolutions]
        return [
            self._complete(member, drawn[member % len(drawn)][member // len(drawn)])
            for member in range(self.num_members)
        ]

    def _decide(self, standing: Standing) -> Decisions:
        decided = [self._decide_group(index, standing) for index in range(len(self.groups))]
        return Decisions(
            copies=tuple(pair for each in decided for pair in each.copies),
            fresh=_collect(each.fresh for each in decided),
            changes={member: values for each in decided for member, values in each.changes.items()},
            retired=_collect(each.retired for each in decided),
            stopped=_collect(each.stopped for each in decided),
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
        decisions = evolution.next(standing.round_number, standing.scores[np.array(group)], values)
        return Decisions(
            copies=tuple((group[loser], group[winner]) for loser, winner in decisions.copies),
            fresh=tuple(group[each] for each in decisions.fresh),
            changes={group[each]: self._complete(group[each], changed) for each, changed in decisions.changes.items()},
            retired=tuple(group[each] for each in decisions.retired),
            stopped=tuple(group[each] for each in decisions.stopped),
        )  # fmt: skip

    def _complete(self, member: int, values: Mapping[str, Any]) -> Values:
        """Add the member's architecture, in the order of the space."""
        complete = {**values, **self.architectures[member % len(self.architectures)]}
        return {path: complete[path] for path in self.space}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "evolutions": [each.state_dict() for each in self._evolutions]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for each, saved in zip(self._evolutions, state["evolutions"], strict=True):
            each.load_state_dict(saved)


def _collect(parts: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(sorted(itertools.chain.from_iterable(parts)))


def build_evolution(
    spec: EvolutionSpec, space: SearchSpace, num_members: int, *, num_rounds: int | None = None, seed: int = 0
) -> Evolution:
    """Build one; with arguments of the Task in the space, one for each architecture. Raises ConfigError where the
    evolution needs more members, or a number of rounds."""
    has_architectures = any(path.startswith(ARCHITECTURE) for path in space)
    make = ArchitectureEvolution if has_architectures else EVOLUTIONS[spec.name]
    return make(spec, space, num_members, num_rounds=num_rounds, seed=seed)
