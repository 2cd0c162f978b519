"""The contract of all evolutions, and the three there are: scores and hyper-parameters of a round in, decisions out.

Called by flows after each round. Evolutions are pure: they draw from generators of their seed and the round's number,
so that a run that was killed decides again what it had decided. They never touch weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from shoal.config import Spec
from shoal.errors import ConfigError, TrainError
from shoal.search.space import SearchSpace, Values

EvolutionName = Literal["pbt", "halving", "random_search"]

_FIELDS: dict[str, tuple[str, ...]] = {
    "pbt": ("every", "quantile", "factors", "resample"),
    "halving": ("every", "reduction", "refill"),
    "random_search": (),
}


class EvolutionSpec(Spec):
    """`evolution=pbt`, or `evolution.name=pbt evolution.quantile=0.2`.

    name:     pbt: the worst members copy the best ones and perturb their hyper-parameters (1711.09846)
              halving: the best 1/`reduction` of each age goes on, others make room for new ones (1810.05934)
              random_search: each keeps the hyper-parameters that it drew
    every:    rounds between two decisions; halving: the age of a member in rounds when it is first compared
    quantile: of the members, those that are replaced, and those that are copied
    factors:  with one of which a perturbed hyper-parameter is multiplied
    resample: the probability that a hyper-parameter is drawn anew instead
    reduction: halving: η of the paper
    refill:   halving: whether a new member takes the row of one that was stopped
    """

    recorded_always = ("name",)  # which `from_override` compares

    name: EvolutionName = "pbt"
    every: int = Field(default=1, ge=1)
    quantile: float = Field(default=0.25, gt=0, le=0.5)
    factors: tuple[float, float] = (0.8, 1.2)
    resample: float = Field(default=0.25, ge=0, le=1)
    reduction: int = Field(default=3, ge=2)
    refill: bool = True

    @model_validator(mode="before")
    @classmethod
    def _parse_name(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    @classmethod
    def from_override(cls, text: str, before: Mapping[str, Any]) -> object:
        """Another evolution begins with its own defaults."""
        return before if text == before.get("name") else {"name": text}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        low, high = self.factors
        if not 0 < low < 1 < high:
            raise ValueError(f"factors = {list(self.factors)}: give one below 1 and one above, as in [0.8, 1.2]")
        for path, info in type(self).model_fields.items():
            if path != "name" and path not in _FIELDS[self.name] and getattr(self, path) != info.default:
                names = " or ".join(name for name, fields in _FIELDS.items() if path in fields)
                raise ValueError(f"{path}: only with evolution.name={names}")
        return self


@dataclass(frozen=True)
class Decisions:
    """What follows from a round, to be done in the order of the fields. No winner is a loser.

    copies:  (loser, winner): the loser's weights, buffers and optimizer state become the winner's
    fresh:   members that begin again with new weights and an empty optimizer state
    changes: member -> all its new hyper-parameters
    retired: members whose score is no number; each is also a loser, fresh or stopped
    stopped: members that are not trained any more
    """

    copies: tuple[tuple[int, int], ...] = ()
    fresh: tuple[int, ...] = ()
    changes: Mapping[int, Values] = field(default_factory=dict)
    retired: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()


@dataclass(frozen=True)
class RoundRanking:
    """A round as evolutions see it.

    scores: [K], NaN for members that failed or were stopped
    ranked: members with a score, the best first; of equal ones the lower number first
    failed: members whose score is no number, in their order
    """

    round_number: int
    is_last: bool
    scores: np.ndarray
    values: Sequence[Mapping[str, Any]]
    ranked: tuple[int, ...]
    failed: tuple[int, ...]
    rng: np.random.Generator


class Evolution(ABC):
    """Decides after each round who copies whom and with which hyper-parameters.

    num_rounds: of the run, after which nothing is decided any more
    """

    def __init__(
        self, spec: EvolutionSpec, space: SearchSpace, num_members: int, *, num_rounds: int, seed: int = 0
    ) -> None:
        if num_rounds < 1:
            raise ConfigError("rounds", num_rounds, "must be at least 1")
        self.spec = spec
        self.space = space
        self.num_members = num_members
        self.num_rounds = num_rounds
        self.seed = seed
        self._stopped: set[int] = set()
        self._set_up()

    def _set_up(self) -> None:  # noqa: B027 - not every one has a state
        """Make the first state. Raises ConfigError for members or rounds with which it cannot decide."""

    def require_members(self, least: int) -> None:
        """Raises ConfigError if the population is too small for the evolution."""
        if self.num_members < least:
            problem = f"evolution.name={self.spec.name} compares members, and needs {least} at least"
            raise ConfigError("members", self.num_members, problem, "raise it, or use evolution.name=random_search")

    def sample(self) -> list[Values]:
        """The hyper-parameters that each member begins with."""
        rng = np.random.default_rng([self.seed, 0])
        return [self.space.sample(rng) for _ in range(self.num_members)]

    def next(
        self, round_number: int, scores: Sequence[float] | np.ndarray, hyper_parameters: Sequence[Mapping[str, Any]]
    ) -> Decisions:
        """The decisions after a round.

        round_number: 1 for the first one
        scores:       [K], of which higher ones are better; NaN and infinities are members that failed
        hyper_parameters: [K], with which each was trained in this round
        Raises TrainError when no member has a score.
        """
        assert round_number >= 1
        assert len(scores) == len(hyper_parameters) == self.num_members
        given = np.array(scores, dtype=np.float64)  # a copy
        given[~np.isfinite(given)] = np.nan
        given[list(self._stopped)] = np.nan
        present = [member for member in range(self.num_members) if member not in self._stopped]
        failed = tuple(member for member in present if np.isnan(given[member]))
        ranked = sorted(set(present) - set(failed), key=lambda member: (-given[member], member))
        if not ranked:
            raise TrainError(
                f"no member has a finite score after round {round_number}: all diverged. Narrow the space, for example"
                " with a lower upper end of the learning rate"
            )
        is_last = round_number >= self.num_rounds
        rng = np.random.default_rng([self.seed, round_number])
        decisions = self._decide(
            RoundRanking(round_number, is_last, given, hyper_parameters, tuple(ranked), failed, rng)
        )
        self._stopped |= set(decisions.stopped)
        return decisions

    @abstractmethod
    def _decide(self, ranking: RoundRanking) -> Decisions:
        """The decisions; every failed member is among the retired ones."""

    def state_dict(self) -> dict[str, Any]:
        """What later decisions depend on: numbers, and lists of them."""
        return {"stopped": sorted(self._stopped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Decide from now on as the evolution did whose state it is."""
        self._stopped = set(state["stopped"])


class RandomSearch(Evolution):
    """Each member keeps the hyper-parameters that it drew (Bergstra & Bengio, 2012); one whose score is no number is
    stopped."""

    def _decide(self, ranking: RoundRanking) -> Decisions:
        return Decisions(retired=ranking.failed, stopped=ranking.failed)


class Halving(Evolution):
    """Successive halving with early stopping, within a population (1810.05934).

    At the ages of every · η^i rounds a member continues if its score is among the best 1/η of those seen so far at that
    age. With `refill`, a new member with new weights takes the row of a stopped one; without, the row stays empty.

    Not of the paper: its trials are paused at an age and promoted later, ours go on or end at once; members are trained
    in step, so that those of one age are compared after all have arrived. A member whose score is no number is stopped.
    Raises ConfigError where it would stop no member.
    """

    def _set_up(self) -> None:
        spec, num_rounds = self.spec, self.num_rounds
        self.require_members(spec.reduction)
        if spec.every >= num_rounds:
            problem = f"no member would be compared within {num_rounds} rounds"
            raise ConfigError("evolution.every", spec.every, problem, f"use at most {num_rounds - 1}")
        num_rungs = math.ceil(math.log(num_rounds / spec.every, spec.reduction) - 1e-9)
        self.rungs = [spec.every * spec.reduction**index for index in range(num_rungs)]  # ages, in rounds
        self._scores: list[list[float]] = [[] for _ in self.rungs]
        self._births = [0] * self.num_members

    def _decide(self, ranking: RoundRanking) -> Decisions:
        ages = {member: ranking.round_number - self._births[member] for member in ranking.ranked}
        arrived = [(member, self.rungs.index(age)) for member, age in ages.items() if age in self.rungs]
        for member, rung in arrived:
            self._scores[rung].append(float(ranking.scores[member]))
        rejected = []
        for member, rung in arrived:
            seen = sorted(self._scores[rung], reverse=True)
            if ranking.scores[member] < seen[math.ceil(len(seen) / self.spec.reduction) - 1]:
                rejected.append(member)
        dropped = tuple(sorted([*ranking.failed, *(() if ranking.is_last else rejected)]))
        if not (self.spec.refill and self.num_rounds - ranking.round_number >= self.spec.every):
            return Decisions(retired=ranking.failed, stopped=dropped)
        for member in dropped:
            self._births[member] = ranking.round_number
        changes = {member: self.space.sample(ranking.rng) for member in dropped}
        return Decisions(retired=ranking.failed, fresh=dropped, changes=changes)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scores": [list(each) for each in self._scores], "births": list(self._births)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._scores, self._births = [list(each) for each in state["scores"]], list(state["births"])
        self._scores += [[] for _ in self.rungs[len(self._scores) :]]  # a run that continues for more rounds has more


class PBT(Evolution):
    """Population based training: truncation selection, then other hyper-parameters by chance.

    PBT (1711.09846):

        exploit: a member of the worst `quantile` copies one of the best `quantile`, drawn uniformly (section 4.1.1,
                 truncation selection; the paper's quantile is 0.2)
        explore: each hyper-parameter that it copied is drawn again with the probability `resample`, else multiplied by
                 one of `factors` (section 4.1.1; the paper uses one or the other, never both)

    Not of the paper: all members decide together after a round, for they are trained in step; a member whose score is
    no number copies one of the best at once; `SearchSpace.perturb` says which values move where multiplication would
    not. Raises ConfigError for fewer than 2 members.
    """

    def _set_up(self) -> None:
        self.require_members(2)
        self.num_selected = max(1, int(self.spec.quantile * self.num_members))

    def _decide(self, ranking: RoundRanking) -> Decisions:
        is_due = ranking.round_number % self.spec.every == 0 and not ranking.is_last
        winners = ranking.ranked[: self.num_selected]
        worst = (*ranking.ranked, *ranking.failed)[-self.num_selected :] if is_due else ()
        losers = sorted({*worst, *ranking.failed} - set(winners))
        copies = tuple((loser, int(ranking.rng.choice(winners))) for loser in losers)
        changes: dict[int, Values] = {}
        for loser, winner in copies:
            perturbed = self.space.perturb(ranking.values[winner], ranking.rng, self.spec.factors)
            changes[loser] = self.space.resample(perturbed, ranking.rng, self.spec.resample)
        return Decisions(copies=copies, changes=changes, retired=ranking.failed)


EVOLUTIONS: dict[str, type[Evolution]] = {"pbt": PBT, "halving": Halving, "random_search": RandomSearch}


def build_evolution(
    spec: EvolutionSpec, space: SearchSpace, num_members: int, *, num_rounds: int, seed: int = 0
) -> Evolution:
    """Build one. Raises ConfigError where it needs more members, or more rounds."""
    return EVOLUTIONS[spec.name](spec, space, num_members, num_rounds=num_rounds, seed=seed)
