"""The contract of all evolutions: scores and hyper-parameters of a round in, decisions out.

Called by flows after each round. Evolutions are pure: they draw from generators of their seed and the round's number,
so that a run that was killed decides again what it had decided. They never touch weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.errors import ConfigError, TrainError
from shoal.libs.population.evolution.spec import EvolutionSpec
from shoal.search.space import SearchSpace, Values


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
class Standing:
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
        decisions = self._decide(Standing(round_number, is_last, given, hyper_parameters, tuple(ranked), failed, rng))
        self._stopped |= set(decisions.stopped)
        return decisions

    @abstractmethod
    def _decide(self, standing: Standing) -> Decisions:
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

    def _decide(self, standing: Standing) -> Decisions:
        return Decisions(retired=standing.failed, stopped=standing.failed)
