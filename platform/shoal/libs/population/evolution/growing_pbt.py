"""PBT with growing steps: iterated population based training with task-agnostic restarts, IPBT (2511.09190).

Between restarts members are selected as in PBT and explore as in PB2, within a box around what they copied. Of the
paper:
    when:    the best score of each decision since the last restart, standardised and smoothed by a Gaussian process,
             has not risen for `patience` decisions; or the last `slow_steps` raised it by less than 1. Not when fewer
             than two of the longer steps would fit into the rest of the run
    weights: all but the best `quantile` copy one of these; then each is shrunk and perturbed, and the fraction `fresh`
             of the members begins with new weights (shrink-perturb, 1910.08475)
    hyper-parameters: half are drawn at random, the others are proposed by a time-varying bandit over restarts: what an
             iteration began with, and the best score that its descendants reached
    step:    `every` grows by the factor `growth`

Not of the paper: its first step and the first after a restart train twice as many members and keep the better half,
which a population of a fixed size cannot; its box grows and shrinks with success (2207.09405), ours has a constant
width; its smoothing models noise that varies, ours is constant; it evaluates members before their first step, so that
its bandit has observations one decision earlier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.libs.population.evolution.bandit import Bandit, fit
from shoal.libs.population.evolution.evolution import Decisions, ShrinkAndPerturb, Standing
from shoal.libs.population.evolution.pbt import PB2
from shoal.search.space import Values

BOX_WIDTH = 0.4  # the first one of the trust region of 2207.09405


class GrowingPBT(PB2):
    """Raises ConfigError for fewer than 2 members."""

    box_width = BOX_WIDTH

    def _set_up(self) -> None:
        super()._set_up()
        self.step = self.spec.every  # rounds between two decisions
        self._due = self.step  # the round of the next one
        self._stagnant = 0
        self._bests: list[float] = []  # the best score at each decision of this iteration
        self._iteration = 0
        # What members began an iteration with: positions, its number, and the best score of all descendants.
        self._starts: list[list[float]] = []
        self._start_iterations: list[int] = []
        self._start_bests: list[float | None] = []
        self._origins: list[int] = []  # index of each member's start

    def _is_due(self, standing: Standing) -> bool:
        return standing.round_number == self._due

    def _decide(self, standing: Standing) -> Decisions:
        if not self._origins:
            self._begin_iteration([dict(values) for values in standing.values])
        for member in standing.ranked:
            origin, score = self._origins[member], float(standing.scores[member])
            best = self._start_bests[origin]
            self._start_bests[origin] = score if best is None else max(best, score)
        is_due = self._is_due(standing)
        if is_due and not standing.is_last:
            self._bests.append(float(standing.scores[standing.ranked[0]]))
            end_of_two = standing.round_number + 2 * self.step * self.spec.growth  # of the longer steps
            if self._is_stagnant() and (self.num_rounds is None or end_of_two <= self.num_rounds):
                return self._restart(standing)
        decisions = super()._decide(standing)
        for loser, winner in decisions.copies:
            self._origins[loser] = self._origins[winner]
        if is_due:
            self._due += self.step
        return decisions

    def _is_stagnant(self) -> bool:
        bests = np.array(self._bests)
        if len(bests) < 2:
            return False
        scaled = (bests - bests.mean()) / (bests.std() or 1.0)
        steps = self.spec.slow_steps
        if len(bests) >= steps and scaled.max() - scaled[: len(bests) - steps + 1].max() < 1:
            return True
        positions = np.column_stack([np.linspace(0, 1, len(scaled)), np.zeros(len(scaled))])
        smoothed = fit(positions, scaled).predict(positions)
        self._stagnant = 0 if smoothed[-1] > smoothed[-2] else self._stagnant + 1
        return self._stagnant >= self.spec.patience

    def _restart(self, standing: Standing) -> Decisions:
        members, rng = range(self.num_members), standing.rng
        winners = standing.ranked[: self.num_selected]
        num_fresh = round(self.spec.fresh * self.num_members)
        fresh = sorted(int(member) for member in rng.choice(self.num_members, num_fresh, replace=False))
        shrunk = tuple(member for member in members if member not in fresh)
        losers = [member for member in shrunk if member not in winners]
        copies = tuple((loser, int(rng.choice(winners))) for loser in losers)
        self.step *= self.spec.growth
        self._due = standing.round_number + self.step
        changes = self._draw_starts(rng)
        self._begin_iteration(changes)
        restart = ShrinkAndPerturb(shrunk, self.spec.shrink, self.spec.perturb, standing.ranked[0], self.step)
        return Decisions(copies, tuple(fresh), restart, dict(enumerate(changes)), standing.failed)

    def _draw_starts(self, rng: np.random.Generator) -> list[Values]:
        """The hyper-parameters of all members after a restart."""
        bandit = Bandit(self.space)
        newest: list[tuple[float, Values]] = []  # of the iteration that ends
        for units, iteration, best in zip(self._starts, self._start_iterations, self._start_bests, strict=True):
            if best is not None:  # None: it never had a score
                values = self.space.from_unit(units)
                bandit.observe(values, 0.0, iteration, best)
                newest += [(best, values)] if iteration == self._iteration else []
        _, parent = max(newest, key=lambda each: each[0])
        num_random = round(self.spec.fresh * self.num_members) if bandit.is_ready else self.num_members
        drawn = [self.space.sample(rng) for _ in range(num_random)]
        while len(drawn) < self.num_members:
            drawn.append(bandit.propose(parent, 0.0, self._iteration + 1, drawn, rng, width=self.box_width))
        order = rng.permutation(self.num_members)
        return [drawn[index] for index in order]

    def _begin_iteration(self, values: list[Values]) -> None:
        if self._origins:
            self._iteration += 1
        first = len(self._starts)
        self._origins = list(range(first, first + self.num_members))
        self._starts += [[float(unit) for unit in self.space.to_unit(each)] for each in values]
        self._start_iterations += [self._iteration] * self.num_members
        self._start_bests += [None] * self.num_members
        self._bests, self._stagnant = [], 0
        self.bandit, self._before, self._time = Bandit(self.space), [None] * self.num_members, 0

    def begin_again(self, round_number: int) -> None:
        super().begin_again(round_number)
        self._origins = []  # the next decision begins an iteration
        self._due = max(self._due, round_number + self.step)

    def state_dict(self) -> dict[str, Any]:
        numbers = {"step": self.step, "due": self._due, "stagnant": self._stagnant, "iteration": self._iteration}
        starts = {
            "starts": [list(each) for each in self._starts],
            "start_iterations": list(self._start_iterations),
            "start_bests": list(self._start_bests),
        }
        return {**super().state_dict(), **numbers, **starts, "bests": list(self._bests), "origins": list(self._origins)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.step, self._due, self._stagnant = state["step"], state["due"], state["stagnant"]
        self._iteration, self._bests, self._origins = state["iteration"], list(state["bests"]), list(state["origins"])
        self._starts = [list(each) for each in state["starts"]]
        self._start_iterations, self._start_bests = list(state["start_iterations"]), list(state["start_bests"])
